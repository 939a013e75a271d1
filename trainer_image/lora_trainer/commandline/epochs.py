"""`--num_epochs` in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lora_api.config import TrainerConfig
from lora_api.datasets import DatasetConfig
from lora_api.exit_codes import ExitCode
from lora_trainer.commandline.assemble import Draft
from lora_trainer.commandline.refusal import Refusal
from lora_trainer.data.scan import scan
from lora_trainer.errors import DataError
from lora_trainer.stages import stages_of

_MOST_STEPS = 10_000_000


def count_samples(datasets: Sequence[DatasetConfig]) -> int:
    """Samples of one epoch: every picture once for each resolution, `num_repeats` times.

    Raises:
        Refusal: When a folder can't be looked through.
    """
    total = 0
    for number, each in enumerate(datasets):
        if "://" in each.folder_path:
            raise Refusal(f"--num_epochs: {each.folder_path} can't be counted beforehand; use --steps")
        try:
            folder, name = Path(each.folder_path).expanduser(), f"datasets[{number}].folder_path"
            pictures = scan(folder, each.caption_ext, name, clips=each.num_frames > 1)
        except DataError as error:
            raise Refusal(str(error), ExitCode.DATA) from error
        total += len(pictures) * len(each.resolution) * each.num_repeats
    return total


def make_room(found: Draft) -> None:
    """Lets the last stage go on for as many epochs as are asked for, however long the stages before it are.

    Raises:
        Refusal: When the last stage has steps of its own, which leaves nothing for epochs to say.
    """
    train = found.raw.get("train")
    stages = train.get("stages") if isinstance(train, dict) else None
    if not isinstance(stages, list) or not stages:
        return
    if isinstance(stages[-1], dict) and stages[-1].get("steps") is not None:
        raise Refusal(
            "--num_epochs: the stages have their steps already; leave steps out of the last one, which then goes on for as many "
            "epochs, or remove the flag"
        )
    found.put("train.steps", _MOST_STEPS, "--num_epochs")


def steps_of(epochs: int, samples: int, config: TrainerConfig, processes: int) -> tuple[int, str]:
    """Optimizer steps that show as many samples as `epochs` hold, and the sum in words.

    Args:
        epochs: How often each sample is seen.
        samples: Of one epoch.
        config: Stages before the last have lengths of their own; the last one shows what is left.
        processes: Ranks.

    Raises:
        Refusal: When the stages before the last show all of them.
    """
    *before, last = stages_of(config)
    shown = (
        sum(((stage.end or 0) - stage.begin) * stage.batch_size * stage.accumulation for stage in before) * processes
    )
    left, per_step = epochs * samples - shown, last.batch_size * last.accumulation * processes
    if left <= 0:
        raise Refusal(
            f"--num_epochs: {epochs} epochs are {epochs * samples} samples, but the stages before the last one show {shown}; "
            "ask for more epochs, or make these stages shorter"
        )
    steps = last.begin + math.ceil(left / per_step)
    if before:
        return steps, (
            f"{epochs} epochs of {samples} samples are {steps} steps: the stages before the last one show {shown} samples, and "
            f"the last shows {per_step} in each step"
        )
    return steps, (
        f"{epochs} epochs of {samples} samples, {per_step} in each step, are {steps} steps "
        f"(batch {last.batch_size} x accumulation {last.accumulation} x processes {processes})"
    )
