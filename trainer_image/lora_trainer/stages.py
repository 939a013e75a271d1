"""The stages of a run: what changes at which step. Pure; nothing here needs torch.

A run without `train.stages` is one stage that ends with the run. A stage is chosen by the step alone, so raising `train.steps`
lengthens the last one, and all ranks agree without talking. The data of a stage is counted from the iteration in which it
began, which `TrainState` keeps: skipped iterations make that differ from the step.

References:
    Checked in tests/unit/test_trainer_stages.py and tests/trainer/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_api.config import TrainerConfig
from lora_api.datasets import DatasetConfig
from lora_api.order import StageConfig
from lora_api.shrink import piece_size
from lora_api.training import TrainConfig
from lora_trainer.schedule import learning_rate

if TYPE_CHECKING:
    from lora_trainer.settings import Settings

Datasets = tuple[DatasetConfig, ...]


@dataclass(frozen=True)
class Stage:
    """One stage with everything that a stage can change.

    Attributes:
        number: From 0.
        count: Stages of the run.
        begin: Updates done when it begins.
        end: Updates done when it ends; None for the last, which ends with the run.
        batch_size: Samples of a rank in one batch.
        accumulation: Batches in one update.
        lr: Its own rate; None: that of the settings, which may change.
        schedule: Names a schedule over its own steps; None: the run's schedule goes on.
        datasets: As they are trained in it.
        pieces: In which each batch goes through the model, see `lora_api.shrink`.
    """

    number: int
    count: int
    begin: int
    end: int | None
    batch_size: int
    accumulation: int
    lr: float | None
    schedule: TrainConfig | None
    datasets: Datasets
    pieces: int = 1

    @property
    def passes(self) -> int:
        """Forward passes of a rank in one update."""
        return self.accumulation * self.pieces

    @property
    def name(self) -> str:
        """For people: `stage 2/3`; nothing where there is only one."""
        return f"stage {self.number + 1}/{self.count}" if self.count > 1 else ""

    @property
    def work(self) -> float:
        """What an update costs a rank, relative to other stages: samples times mean pixels of a sample."""
        areas = [side * side for each in self.datasets for side in each.resolution]
        return self.batch_size * self.accumulation * sum(areas) / len(areas)

    def steps_between(self, first: int, last: int) -> int:
        """How many of the steps after `first` updates, until there are `last`, lie in this stage."""
        end = last if self.end is None else min(last, self.end)
        return max(0, end - max(first, self.begin))


def stages_of(config: TrainerConfig, shrunk: int = 0) -> tuple[Stage, ...]:
    """The stages of a run, at least one, without gaps.

    Args:
        config: What defines the run.
        shrunk: How often device memory ran out.
    """
    found: list[Stage] = []
    begin = 0
    parts = config.train.stages or (StageConfig(),)
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        end = None if is_last else begin + (part.steps or 0)
        stage = _stage(config, part, number, (begin, end))
        found.append(replace(stage, pieces=stage.batch_size // piece_size(stage.batch_size, shrunk)))
        begin = end or 0
    return tuple(found)


def _stage(config: TrainerConfig, part: StageConfig, number: int, ends: tuple[int, int | None]) -> Stage:
    train = config.train
    return Stage(
        number=number,
        count=max(1, len(train.stages)),
        begin=ends[0],
        end=ends[1],
        batch_size=part.batch_size or train.batch_size,
        accumulation=part.gradient_accumulation or train.gradient_accumulation,
        lr=part.lr,
        schedule=_schedule(train, part),
        datasets=tuple(_dataset(each, part) for each in config.datasets),
    )


def _schedule(train: TrainConfig, part: StageConfig) -> TrainConfig | None:
    changes: dict[str, object] = {}
    if part.lr_scheduler is not None:
        changes |= {"lr_scheduler": part.lr_scheduler}
    if part.lr_scheduler_params is not None:
        changes |= {"lr_scheduler_params": part.lr_scheduler_params}
    if part.warmup_steps is not None:
        changes |= {"warmup_steps": part.warmup_steps, "warmup_ratio": 0.0}
    return train.model_copy(update=changes) if changes else None


def _dataset(config: DatasetConfig, part: StageConfig) -> DatasetConfig:
    changes: dict[str, object] = {}
    if part.resolution is not None:
        changes["resolution"] = part.resolution
    if part.caption_dropout is not None:
        changes["caption_dropout"] = part.caption_dropout
    return config.model_copy(update=changes) if changes else config


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of the update after `step` updates."""
    return next(stage for stage in stages if stage.end is None or step < stage.end)


def views_of(stages: Sequence[Stage]) -> tuple[Datasets, ...]:
    """The different ways in which the datasets are trained, in the order of the stages."""
    return tuple(dict.fromkeys(stage.datasets for stage in stages))


def rate_at(step: int, stage: Stage, train: TrainConfig, settings: Settings) -> float:
    """The learning rate of the update after `step` updates, before the parameter groups scale it.

    Args:
        step: Updates done so far.
        stage: The stage of that update.
        train: What the run was begun with.
        settings: Steps and rate in force.
    """
    base = settings.lr if stage.lr is None else stage.lr
    if stage.schedule is None:
        return learning_rate(step, base=base, steps=settings.steps, train=train)
    end = settings.steps if stage.end is None else stage.end
    return learning_rate(step - stage.begin, base=base, steps=end - stage.begin, train=stage.schedule)


def samples_by(stages: Sequence[Stage], step: int, world_size: int) -> int:
    """Samples trained in the first `step` updates."""
    return world_size * sum(stage.steps_between(0, step) * stage.batch_size * stage.accumulation for stage in stages)


def steps_left(stages: Sequence[Stage], step: int, steps: int) -> float:
    """The remaining steps, each counted by what it costs relative to one of the present stage.

    Cost is taken to grow with the samples of a step and their pixels, which is close while the device is busy.
    """
    now = stage_at(stages, step).work
    return sum(stage.steps_between(step, steps) * (stage.work / now) for stage in stages)
