"""`--num_epochs` in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lora_api.config import TrainerConfig
from lora_api.datasets import DatasetConfig
from lora_api.exit_codes import ExitCode
from lora_trainer.commandline.refusal import Refusal
from lora_trainer.data.scan import scan
from lora_trainer.errors import DataError


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


def steps_of(epochs: int, samples: int, config: TrainerConfig, processes: int) -> tuple[int, str]:
    """Optimizer steps that show every sample `epochs` times, and the sum in words."""
    train = config.train
    per_step = train.batch_size * train.gradient_accumulation * processes
    steps = math.ceil(epochs * samples / per_step)
    return steps, (
        f"{epochs} epochs of {samples} samples, {per_step} in each step, are {steps} steps "
        f"(batch {train.batch_size} x accumulation {train.gradient_accumulation} x processes {processes})"
    )
