"""What is minimised, and the noise it is measured with.

The loss is the mean squared error between what the family's model predicts and its target. For flow matching,
x_t = (1 - sigma) x0 + sigma n and the target is n - x0; see `families.unet` for DDPM.

All randomness is counter-based: what the sample in slot `slot` of iteration `iteration` draws follows from (seed,
iteration, slot) alone. No generator state needs saving, and a run gives the same numbers on one process or many, with
a batch of four or four batches of one. Noise is drawn on the CPU, so devices agree.

References:
    Lipman et al. 2023, "Flow Matching for Generative Modeling"; Esser et al. 2024, section 3.1 (logit-normal density).
    Checked in tests/trainer/test_loop.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lora_trainer.data.sampler import mix

_NOISE, _DROPOUT = 3, 4  # the sampler uses 1 and 2


@dataclass(frozen=True)
class Draw:
    """What one sample draws."""

    u: Tensor  # () in (0, 1): where on the density of noise levels
    drop: float  # in [0, 1): the caption is dropped when this is below its rate
    noise: Tensor  # (C, h, w)


def draw(
    seed: int, iteration: int, slot: int, shape: tuple[int, ...], density: Literal["logit_normal", "uniform"]
) -> Draw:
    """The draws of one sample.

    Args:
        seed: `train.seed`.
        iteration: Number of the pass through the loop, from 0.
        slot: Number of the sample among all of the iteration, over micro-batches and ranks.
        shape: Of the latents, (C, h, w).
        density: Of u.
    """
    generator = torch.Generator().manual_seed(mix(seed, _NOISE, iteration, slot))
    drop = float(torch.rand((), generator=generator, dtype=torch.float64))
    u = torch.rand((), generator=generator) if density == "uniform" else torch.randn((), generator=generator).sigmoid()
    return Draw(u, drop, torch.randn(shape, generator=generator))


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


def loss_of(prediction_BChw: Tensor, target_BChw: Tensor) -> Tensor:
    """Mean squared error, in fp32."""
    return mse_loss(prediction_BChw.float(), target_BChw)
