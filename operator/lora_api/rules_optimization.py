"""What optimizer, schedule and averages ask of each other; see `rules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig


def the_warm_up_is_given_once(config: TrainerConfig) -> str | None:
    """Two lengths of one warm-up contradict each other."""
    train = config.train
    if train.warmup_steps and train.warmup_ratio:
        return f"train.warmup_ratio: {train.warmup_ratio:g}, and warmup_steps is {train.warmup_steps}; set one of them"
    return None


def the_schedule_has_the_shape_it_is_given(config: TrainerConfig) -> str | None:
    """Parameters of another schedule would be ignored; restarts without a number never happen."""
    kind, params = config.train.lr_scheduler, config.train.lr_scheduler_params
    if kind == "cosine_with_restarts" and params.num_cycles == 1:
        return (
            "train.lr_scheduler_params.num_cycles: 1 cycle never restarts; set 2 or more with lr_scheduler "
            "cosine_with_restarts, or choose cosine"
        )
    wrong = {
        "num_cycles": params.num_cycles != 1 and kind != "cosine_with_restarts",
        "power": params.power != 1 and kind != "polynomial",
        "min_lr_ratio": params.min_lr_ratio != 0 and kind == "constant",
    }
    for field, is_so in wrong.items():
        if is_so:
            return (
                f"train.lr_scheduler_params.{field}: {getattr(params, field):g} plays no part with lr_scheduler {kind}; "
                "remove it"
            )
    return None


RULES: tuple[Callable[[TrainerConfig], str | None], ...] = (
    the_warm_up_is_given_once,
    the_schedule_has_the_shape_it_is_given,
)
"""In the order in which they are asked."""
