"""Blocks of `spec.config.train`: shape of the learning rate, parameters of optimizers, averages of the weights."""

from __future__ import annotations

from pydantic import Field

from lora_api.base import Native


class SchedulerParams(Native):
    """What shapes the learning-rate schedule."""

    num_cycles: int = Field(
        1, ge=1, le=1000, description="Cosines, one after another; for cosine_with_restarts, at least 2."
    )
    power: float = Field(1.0, gt=0, le=10, description="Exponent of polynomial.")
    min_lr_ratio: float = Field(
        0.0, ge=0, lt=1, description="Where the rate ends, as a share of `lr`; for all schedules but constant."
    )
