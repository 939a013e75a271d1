#!/usr/bin/env python3
"""Trains a LoRA adapter: `python train_lora.py --base_model DIR --train_data DIR --output_dir DIR`; see --help.

The same as `lora-trainer train`, straight from the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "operator"), str(HERE / "trainer_image")]


def main() -> None:
    """Trains as the flags say."""
    from lora_trainer.stopping import STOP, Stopped  # noqa: PLC0415 - signals first, then everything else

    STOP.install()
    try:
        from lora_trainer.cli import run_training  # noqa: PLC0415 - as above
    except Stopped:
        sys.exit(85)  # "stopped", as everywhere
    except ModuleNotFoundError as error:
        sys.exit(
            f"{error}: run `make lint` once, which installs everything into .venv, then .venv/bin/python {sys.argv[0]}"
        )
    run_training(sys.argv[1:], "python train_lora.py")


if __name__ == "__main__":
    main()
