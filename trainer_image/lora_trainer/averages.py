"""Averages of the weights: what samples, the adapters of checkpoints and the final adapter are made from.

Training itself never sees them. While one stands in the parameters, for as long as something is written or drawn, the
weights that training goes on with are kept, and put back to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lora_api.optimization import EmaConfig
from lora_api.training import TrainConfig


class Average(ABC):
    """An average over the weights that training went through."""

    @abstractmethod
    def update(self, step: int) -> None:
        """Takes the weights in; called after each update.

        Args:
            step: Updates done, from 1.
        """

    @abstractmethod
    def restart(self) -> None:
        """From now on the average is what the parameters hold."""

    @abstractmethod
    def in_place(self) -> AbstractContextManager[None]:
        """The average in the parameters, for as long as the context lasts."""


class MovingAverage(Average):
    """Exponential moving average of fp32 parameters, on their device.

    Args:
        parameters: What is trained.
        config: Decay and its warm-up.

    References:
        Polyak & Juditsky 1992; the form of Yazıcı et al. 2019, "The Unusual Effectiveness of Averaging in GAN Training",
        section 3. Checked in tests/trainer/test_averages.py.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], config: EmaConfig) -> None:
        self._parameters: list[Tensor] = [parameter.detach() for parameter in parameters]
        self._config = config
        self._shadow = [parameter.clone() for parameter in self._parameters]

    def update(self, step: int) -> None:
        """See `Average`; a few kernels over all parameters, without a wait for the device."""
        torch._foreach_lerp_(self._shadow, self._parameters, 1.0 - decay(step, self._config))

    def restart(self) -> None:
        """See `Average`."""
        torch._foreach_copy_(self._shadow, self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """See `Average`; needs memory for one more tensor at a time."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, shadow in zip(self._parameters, self._shadow, strict=True):
            kept = parameter.clone()
            parameter.copy_(shadow)
            shadow.copy_(kept)


class ScheduleFreeAverage(Average):
    """The average that schedule-free AdamW keeps itself, between the points where it takes gradients and its base points.

    Args:
        optimizer: Keeps it.

    References:
        Defazio et al. 2024, "The Road Less Scheduled", equation 1: y = (1 - beta) z + beta x.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def update(self, step: int) -> None:
        """See `Average`; the optimizer has done it."""

    def restart(self) -> None:
        """See `Average`; the optimizer's state decides."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """See `Average`; needs memory for all parameters once more."""
        kept = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                base = self._optimizer.state.get(parameter, {}).get("z")
                if base is not None:
                    point = parameter.detach()
                    kept.append((point, point.clone()))
                    point.lerp_(base, 1.0 - 1.0 / group["betas"][0])
        try:
            yield
        finally:
            for point, before in kept:
                point.copy_(before)


def decay(step: int, config: EmaConfig) -> float:
    """The decay of an update: as configured, and less at first, so that the start values are soon forgotten.

    Args:
        step: Updates done, from 1.
        config: The decay and whether it is warmed up.
    """
    return min(config.ema_decay, (1 + step) / (10 + step)) if config.ema_warmup else config.ema_decay


def build_average(
    parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, config: TrainConfig
) -> Average | None:
    """The average that a configuration asks for, beginning with the parameters as they are; None where there is none."""
    if config.optimizer == "schedule_free_adamw":
        return ScheduleFreeAverage(optimizer)
    return MovingAverage(parameters, config.ema_config) if config.ema_config.use_ema else None


def standing_in(average: Average | None) -> AbstractContextManager[None]:
    """`in_place`, where there is an average."""
    return nullcontext() if average is None else average.in_place()
