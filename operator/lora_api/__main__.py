"""`python -m lora_api generate | verify`: the CRDs and the reference page, from the types."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lora_api import generate


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 when a generated file is out of date."""
    parser = argparse.ArgumentParser(prog="python -m lora_api", description=__doc__)
    parser.add_argument("command", choices=["generate", "verify"], help="write the files, or compare them")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository's root (default: here)")
    chosen = parser.parse_args(arguments)
    if not (chosen.root / "pyproject.toml").is_file():
        parser.error(f"{chosen.root}: not the repository's root (no pyproject.toml); change there or give --root")
    if chosen.command == "generate":
        sys.stdout.writelines(f"wrote {name}\n" for name in generate.write(chosen.root))
        return 0
    difference = generate.differences(chosen.root)
    if difference:
        sys.stdout.write(difference)
        sys.stderr.write(f"generated files are out of date; run `{generate.COMMAND}` and commit the result\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
