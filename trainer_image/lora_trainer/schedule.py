"""Learning rate as a pure function of the step: nothing to save, exact at resume and after `steps` was changed.

Every formula is checked in tests/unit/test_trainer_schedule.py, against torch's own schedulers where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lora_api.optimization import SchedulerParams
from lora_api.training import TrainConfig

_RISE = 0.3  # share of the steps in which one_cycle rises, when no warm-up is given
_FIRST = 1 / 25  # of the peak, where one_cycle begins


def learning_rate(step: int, *, base: float, steps: int, train: TrainConfig) -> float:
    """The rate of the update after `step` updates.

    Linear from base/warmup to base over the warm-up, then along the schedule to its floor at `steps`, and there it stays.

    Args:
        step: Updates done so far, from 0.
        base: Rate at the peak.
        steps: Updates in all.
        train: Names the schedule, its warm-up and its shape; `train.lr` and `train.steps` are not read.

    References:
        Loshchilov & Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", equation 5.
        Smith & Topin 2019, "Super-Convergence", section 3, with the cosines of torch's OneCycleLR.
        Chen, Wolfe & Kyrillidis 2022, "REX: Revisiting Budgeted Training with an Improved Schedule", section 3.
    """
    warmup, floor = warmup_steps(steps, train), train.lr_scheduler_params.min_lr_ratio
    if train.lr_scheduler == "one_cycle":
        return base * _one_cycle(step, steps, warmup or round(_RISE * steps), floor)
    if step < warmup:
        return base * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return base * (floor + (1.0 - floor) * _SHAPES[train.lr_scheduler](share, train.lr_scheduler_params))


def warmup_steps(steps: int, train: TrainConfig) -> int:
    """Updates of the warm-up, given as a number or as a share of `steps`."""
    return train.warmup_steps or round(train.warmup_ratio * steps)


def _one_cycle(step: int, steps: int, rise: int, floor: float) -> float:
    """Rises for `rise` updates, the last of them at the peak; falls to the floor, which the last update of all has."""
    peak = max(0, rise - 1)
    if step < peak:
        return 1.0 + (_FIRST - 1.0) * _cosine(step / peak)
    share = min(1.0, (step - peak) / max(1, steps - 1 - peak))
    return floor + (1.0 - floor) * _cosine(share)


def _cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _restarting(share: float, params: SchedulerParams) -> float:
    return 0.0 if share >= 1.0 else _cosine(params.num_cycles * share % 1.0)


_SHAPES: dict[str, Callable[[float, SchedulerParams], float]] = {
    "constant": lambda share, params: 1.0,  # noqa: ARG005 - does not fall
    "linear": lambda share, params: 1.0 - share,  # noqa: ARG005 - has no shape of its own
    "cosine": lambda share, params: _cosine(share),  # noqa: ARG005 - has no shape of its own
    "cosine_with_restarts": _restarting,
    "polynomial": lambda share, params: (1.0 - share) ** params.power,
    "rex": lambda share, params: (1.0 - share) / (1.0 - share / 2),  # noqa: ARG005 - has no shape of its own
}
"""From 1 at share 0 of the steps after the warm-up to 0 at share 1."""
