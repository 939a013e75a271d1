"""The order of training: stages, datasets whose weights change over the run, regularisation sets."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from lora_api.base import Native
from lora_api.optimization import LrScheduler, SchedulerParams

STEPS = 1000  # of a run that says nothing of its length
MAX_STAGES = 16
MAX_POINTS = 16

Resolutions: TypeAlias = tuple[Annotated[int, Field(ge=32, le=8192)], ...]


class StageConfig(Native):
    """A part of the run. What it leaves out is as `train` and the datasets say."""

    steps: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Optimizer steps of this stage. The last stage may leave it out and goes on until `train.steps`.",
    )
    batch_size: int | None = Field(None, ge=1, le=1024, description="As `train.batch_size`.")
    gradient_accumulation: int | None = Field(None, ge=1, le=4096, description="As `train.gradient_accumulation`.")
    lr: float | None = Field(
        None,
        gt=0,
        le=10,
        description="As `train.lr`, whose changes while training then pass this stage by. Other rates change in proportion.",
    )
    lr_scheduler: LrScheduler | None = Field(
        None,
        description="A schedule over this stage's own steps. With neither this nor `warmup_steps`, that of the run goes on.",
    )
    lr_scheduler_params: SchedulerParams | None = Field(None, description="Shape of that schedule.")
    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Warm-up at the beginning of this stage, for a schedule over its own steps.",
    )
    resolution: Resolutions | None = Field(
        None, min_length=1, max_length=8, description="In place of the `resolution` of every dataset."
    )
    caption_dropout: float | None = Field(
        None, ge=0.0, le=1.0, description="In place of the `caption_dropout` of every dataset."
    )


class WeightPoint(Native):
    """How much a dataset weighs from a step on. Between two points the value goes straight from one to the other."""

    at_step: int = Field(0, ge=0, le=10_000_000, description="Optimizer steps done.")
    value: float = Field(
        ge=0, le=1e6, description="Weight, relative to the other datasets at that step; 0 leaves the dataset out."
    )


def total_steps(train: Mapping[str, Any]) -> int:
    """`train.steps` where it is left out: the sum of the stages, if every one has its own.

    Args:
        train: The fields before it, validated.
    """
    lengths = [stage.steps for stage in train.get("stages", ())]
    return STEPS if not lengths or None in lengths else sum(lengths)


def without_its_end(train: dict[str, Any]) -> dict[str, Any]:
    """Plain data of a `train` block without the length of the last stage: that follows from `steps`, which may change."""
    stages = train.get("stages")
    if not stages:
        return train
    *others, last = stages
    return {**train, "stages": [*others, {key: value for key, value in last.items() if key != "steps"}]}


def weight_at(points: Sequence[WeightPoint], step: int) -> float:
    """A weight after `step` updates: straight between its points, level before the first and after the last.

    Args:
        points: At least one, in the order of their steps.
        step: Updates done.
    """
    after = bisect.bisect_right(points, step, key=lambda point: point.at_step)
    if after == 0 or after == len(points):
        return points[max(0, after - 1)].value
    one, other = points[after - 1], points[after]
    share = (step - one.at_step) / (other.at_step - one.at_step)
    return one.value + share * (other.value - one.value)
