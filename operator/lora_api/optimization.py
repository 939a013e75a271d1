"""Blocks of `spec.config.train`: shape of the learning rate, parameters of optimizers, averages of the weights."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from lora_api.base import Native

Optimizer = Literal["adamw", "adamw8bit", "adafactor", "prodigy", "lion", "schedule_free_adamw"]

ADAM_LIKE: tuple[Optimizer, ...] = ("adamw", "adamw8bit", "prodigy", "schedule_free_adamw")
"""Optimizers for which `adam_beta1`, `adam_beta2` and `adam_epsilon` have a meaning."""

STATE_BYTES: dict[Optimizer, float] = {
    "adamw": 8,
    "adamw8bit": 2 + 8 / 256,
    "adafactor": 0,
    "prodigy": 16,
    "lion": 4,
    "schedule_free_adamw": 8,
}
"""Bytes that an optimizer keeps for each trained number of a large matrix, besides the number and its gradient (8 bytes).

adamw8bit keeps two scales of 4 bytes for each block of 256, and matrices below 4096 numbers in fp32. Adafactor keeps a row
and a column. Measured in tests/trainer/test_optimizers.py.
"""

LrScheduler: TypeAlias = Literal[
    "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "one_cycle", "rex"
]


class SchedulerParams(Native):
    """What shapes the learning-rate schedule."""

    num_cycles: int = Field(
        1, ge=1, le=1000, description="Cosines, one after another; for cosine_with_restarts, at least 2."
    )
    power: float = Field(1.0, gt=0, le=10, description="Exponent of polynomial.")
    min_lr_ratio: float = Field(
        0.0, ge=0, lt=1, description="Where the rate ends, as a share of `lr`; for all schedules but constant."
    )


class OptimizerParams(Native):
    """What only some optimizers have; refused for others."""

    d_coef: float | None = Field(
        None,
        gt=0,
        le=100,
        description="prodigy: factor on the rate that it finds; below 1 is more careful. Left out: 1.",
    )
    d0: float | None = Field(
        None, gt=0, le=1, description="prodigy: where its search for the rate begins. Left out: 1e-6."
    )
    use_bias_correction: bool | None = Field(None, description="prodigy: Adam's bias correction. Left out: false.")
    safeguard_warmup: bool | None = Field(
        None, description="prodigy: keeps a warm-up from inflating the rate that it finds. Left out: false."
    )
    beta1: float | None = Field(None, ge=0, lt=1, description="lion: share of the momentum in a step. Left out: 0.9.")
    beta2: float | None = Field(None, ge=0, lt=1, description="lion: decay of the momentum. Left out: 0.99.")
    scale_parameter: bool | None = Field(
        None, description="adafactor: multiply each rate by the root mean square of its matrix. Left out: false."
    )
    clip_threshold: float | None = Field(
        None, gt=0, le=1000, description="adafactor: largest root mean square of a step. Left out: 1."
    )
    decay_rate: float | None = Field(
        None, ge=-2, lt=0, description="adafactor: exponent with which its second moment forgets. Left out: -0.8."
    )
    r: float | None = Field(
        None,
        ge=0,
        le=10,
        description="schedule_free_adamw: power of the step in the weights of its average. Left out: 0.",
    )
    weight_lr_power: float | None = Field(
        None, ge=0, le=10, description="schedule_free_adamw: power of the rate in the same weights. Left out: 2."
    )


PARAMS_OF: dict[Optimizer, tuple[str, ...]] = {
    "prodigy": ("d_coef", "d0", "use_bias_correction", "safeguard_warmup"),
    "lion": ("beta1", "beta2"),
    "adafactor": ("scale_parameter", "clip_threshold", "decay_rate"),
    "schedule_free_adamw": ("r", "weight_lr_power"),
}
"""Which field of `OptimizerParams` is for which optimizer."""

LEAST_FACTOR = 0.01
"""Below it a rate for prodigy, which is a factor of about 1 there, must be meant as a rate of AdamW."""


class EmaConfig(Native):
    """An average of the weights, from which samples, adapters of checkpoints and the final adapter are made."""

    use_ema: bool = Field(False, description="Keep an exponential moving average of what is trained.")
    ema_decay: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="Share of the average that stays at each step: 0.999 looks back about 1000 steps.",
    )
    ema_warmup: bool = Field(
        True,
        description="Begin with a smaller decay, (1 + step) / (10 + step), so that the start values are soon forgotten.",
    )
