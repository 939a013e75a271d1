"""`python -m lora_operator`: the same as the command `lora-operator`."""

from __future__ import annotations

from lora_operator.cli import main

if __name__ == "__main__":
    main()
