"""A run of the command line whose memory ran out is made smaller and begun again, as an operator would do it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lora_api import layout
from lora_api.run import Progress, RunConfig
from lora_api.shrink import can_shrink, passes
from lora_api.stores import DirectoryStore
from lora_trainer.commandline.rundir import NAMESPACE, write_run_config

ADVICE = "Nothing is left to make smaller. Lower --resolution or --rank, quantize the base model (--set model.quantize=nf4), or take a device with more memory."


def shrink(path: Path) -> str | None:
    """Makes the run of a run configuration smaller by one more step, in its folder.

    Returns:
        How it is trained now; None when it can't be made smaller, or is an operator's.
    """
    run = RunConfig.model_validate_json(path.read_text())
    train = run.config.train
    if run.namespace != NAMESPACE or not can_shrink(train, run.shrunk):
        return None
    smaller = run.model_copy(update={"shrunk": run.shrunk + 1})
    write_run_config(path.parent, smaller)
    return f"out of device memory: beginning again with {passes(train, smaller.shrunk)} instead of {passes(train, run.shrunk)}"


def shrinking_helps(path: Path) -> bool:
    """Whether it was training steps that had no room, by the last word in the run directory."""
    raw = DirectoryStore(path.parent).get(layout.PROGRESS)
    beat = Progress.model_validate_json(raw) if raw else None
    return beat is not None and beat.exit is not None and beat.exit.shrink_helps


def begin_again(arguments: Sequence[str]) -> NoReturn:
    """Becomes `python ARGUMENTS`: a new process, so that the device's memory is whole again."""
    packages = [
        str(Path(module.__file__ or "").parents[1]) for module in (sys.modules["lora_trainer"], sys.modules["lora_api"])
    ]
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*packages, *([rest] if rest else [])]))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell is wanted
