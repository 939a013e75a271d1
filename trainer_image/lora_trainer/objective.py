"""What is minimised, and the noise it is measured with.

The loss is the mean squared error between what the family's model predicts and its target, unless the configuration asks
for another one or for weights. For flow matching, x_t = (1 - sigma) x0 + sigma n and the target is n - x0; see
`families.unet` for DDPM, `noise_levels` for how sigma is drawn, `losses` for the arithmetic of losses and weights.

All randomness is counter-based: what the sample in slot `slot` of iteration `iteration` draws follows from (seed,
iteration, slot) alone. No generator state needs saving, and a run gives the same numbers on one process or many, with
a batch of four or four batches of one. Noise is drawn on the CPU, so devices agree. Number formats are named: torch's
default belongs to all threads, and libraries change it while they load a text encoder beside the one that draws.

References:
    Lipman et al. 2023, "Flow Matching for Generative Modeling"; Esser et al. 2024, section 3.1 (logit-normal density).
    Guttenberg 2023, "Diffusion With Offset Noise". Ning et al. 2023, "Input Perturbation Reduces Exposure Bias in
    Diffusion Models", algorithm 1. Checked in tests/trainer/test_loop.py and test_objective.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lora_api.training import TrainConfig
from lora_trainer.data.sampler import mix
from lora_trainer.losses import min_snr_weight, scheduled_delta, sigma_weight
from lora_trainer.noise_levels import NoiseLevels

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel, Corrupted

_NOISE, _DROPOUT, _OFFSET, _PERTURBATION = 3, 4, 5, 6  # the sampler uses 1 and 2


@dataclass(frozen=True)
class Draw:
    """What one sample draws."""

    u: Tensor  # () in (0, 1): where on the density of noise levels
    drop: float  # in [0, 1): the caption is dropped when this is below its rate
    noise: Tensor  # (C, h, w)


def draw(
    seed: int, iteration: int, slot: int, shape: Sequence[int], levels: NoiseLevels, *, shift: float = 1.0
) -> Draw:
    """The draws of one sample.

    Args:
        seed: `train.seed`.
        iteration: Number of the pass through the loop, from 0.
        slot: Number of the sample among all of the iteration, over micro-batches and ranks.
        shape: Of the latents, (C, h, w).
        levels: Density of u.
        shift: Of the family, for latents of this shape; counts where `levels` are cut.
    """
    generator = torch.Generator().manual_seed(mix(seed, _NOISE, iteration, slot))
    drop = float(torch.rand((), generator=generator, dtype=torch.float64))
    u = levels.draw(generator, shift)
    return Draw(u, drop, torch.randn(tuple(shape), generator=generator, dtype=torch.float32))


def seed_dropout(seed: int, iteration: int, slot: int, device: torch.device) -> None:
    """Sets the generators that dropout layers draw from, before the forward pass whose first sample is in `slot`."""
    value = mix(seed, _DROPOUT, iteration, slot)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def noisy(x0_BChw: Tensor, noise_BChw: Tensor, sigma_B: Tensor) -> tuple[Tensor, Tensor]:
    """(x_t, target velocity) for latents, noise and noise levels."""
    sigma_B111 = sigma_B.view(-1, *[1] * (x0_BChw.ndim - 1))
    return (1 - sigma_B111) * x0_BChw + sigma_B111 * noise_BChw, noise_BChw - x0_BChw


@dataclass(frozen=True)
class Objective:
    """How samples are made noisy and weighed.

    Attributes:
        seed: `train.seed`.
        levels: Density of noise levels.
        noise_offset: Standard deviation of the noise that is constant over each channel of a sample; 0 is none.
        perturbation: Standard deviation of the noise that the model is shown beside the one it is asked for; 0 is none.
        min_snr_gamma: gamma of `losses.min_snr_weight`; None is off.
        weighting: Scheme of `losses.sigma_weight`.
        delta: Of huber losses.
        schedule: How it depends on the noise level.
    """

    seed: int
    levels: NoiseLevels
    noise_offset: float = 0.0
    perturbation: float = 0.0
    min_snr_gamma: float | None = None
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    delta: float = 0.1
    schedule: Literal["constant", "exponential", "snr"] = "constant"

    @classmethod
    def of(cls, train: TrainConfig, model: BaseModel) -> Objective:
        """What a configuration asks for, for a model that `take_noise_settings` has accepted."""
        return cls(
            seed=train.seed,
            levels=NoiseLevels.of(train, model.density),
            noise_offset=train.noise_offset,
            perturbation=train.input_perturbation,
            min_snr_gamma=train.min_snr_gamma,
            weighting=train.loss_weighting,
            delta=train.huber_delta,
            schedule=train.huber_schedule,
        )

    def draws(self, model: BaseModel, iteration: int, slots: Sequence[int], shape: Sequence[int]) -> list[Draw]:
        """What the samples in some slots draw; `shape` is that of the latents of each."""
        shift = model.shift_of(shape) if self.levels.is_cut else 1.0
        found = [draw(self.seed, iteration, slot, shape, self.levels, shift=shift) for slot in slots]
        if not self.noise_offset:
            return found
        levels = (shape[0], *[1] * (len(shape) - 1))
        return [
            replace(each, noise=each.noise + self.noise_offset * self._more(_OFFSET, iteration, slot, levels))
            for slot, each in zip(slots, found, strict=True)
        ]

    def corrupted(
        self, model: BaseModel, x0_BChw: Tensor, draws: Sequence[Draw], iteration: int, slots: Sequence[int]
    ) -> Corrupted:
        """Latents with their noise in them; arguments as in `draws`, which drew it."""
        noise_BChw, u_B = torch.stack([each.noise for each in draws]), torch.stack([each.u for each in draws])
        asked = model.corrupt(x0_BChw, noise_BChw, u_B)
        if not self.perturbation:
            return asked
        more_BChw = torch.stack([self._more(_PERTURBATION, iteration, slot, x0_BChw.shape[1:]) for slot in slots])
        shown = model.corrupt(x0_BChw, noise_BChw + self.perturbation * more_BChw, u_B)
        return replace(asked, x_t=shown.x_t)

    def weights(self, model: BaseModel, time_B: Tensor) -> Tensor | None:
        """Weights (B,) of samples at these times; None where all are 1."""
        if self.min_snr_gamma is not None:
            assert model.prediction is not None, "take_noise_settings refuses such models"
            return min_snr_weight(model.snr(time_B), self.min_snr_gamma, model.prediction)
        return None if self.weighting == "none" else sigma_weight(time_B, self.weighting)

    def deltas(self, model: BaseModel, time_B: Tensor) -> Tensor | None:
        """Deltas (B,) of huber losses at these times; None where all are `delta`."""
        if self.schedule == "constant":
            return None
        where_B = model.snr(time_B) if self.schedule == "snr" else model.noise_level(time_B)
        return scheduled_delta(where_B, self.delta, self.schedule)

    def _more(self, kind: int, iteration: int, slot: int, shape: Sequence[int]) -> Tensor:
        """Further standard normal noise of a sample."""
        generator = torch.Generator().manual_seed(mix(self.seed, kind, iteration, slot))
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def take_noise_settings(model: BaseModel, train: TrainConfig) -> None:
    """Tells a model how its noise levels are shifted.

    Raises:
        ValueError: It can't do what the configuration asks for; the message begins with the field's path.
    """
    if train.timestep_dynamic_shift and (why := model.refuse_shift_by_size()):
        raise ValueError(f"train.timestep_dynamic_shift: true, but {why}; set it to false")
    for name, asked in (
        ("timestep_shift", train.timestep_shift is not None),
        ("loss_weighting", train.loss_weighting != "none"),
    ):
        if asked and model.prediction != "velocity":
            raise ValueError(f"train.{name}: is for flow matching, which this family is not; remove it")
    for name, asked in (
        ("min_snr_gamma", train.min_snr_gamma is not None),
        ("huber_schedule", train.huber_schedule != "constant"),
    ):
        if asked and model.prediction is None:
            raise ValueError(f"train.{name}: this family does not know its signal-to-noise ratio; remove it")
    model.chosen_shift, model.shifts_by_size = train.timestep_shift, train.timestep_dynamic_shift
