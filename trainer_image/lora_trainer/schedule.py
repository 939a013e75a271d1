"""Learning rate as a pure function of the step: nothing to save, exact at resume."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(step: int, *, base: float, steps: int, warmup: int, kind: Literal["constant", "cosine"]) -> float:
    """The rate of the update after `step` updates.

    Linear from base/warmup to base over the warm-up; then constant, or half a cosine down to 0 at `steps`.

    Args:
        step: Updates done so far, from 0.
        base: `train.lr`.
        steps: Updates in all.
        warmup: `train.warmup_steps`.
        kind: `train.lr_scheduler`.

    References:
        Loshchilov & Hutter 2017, "SGDR", equation 5 with one period; checked in tests/unit/test_trainer_schedule.py.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    if kind == "constant":
        return base
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return base * 0.5 * (1.0 + math.cos(math.pi * share))
