"""Losses of a batch, and weights of its samples by their noise level. Pure arithmetic on tensors.

Shapes as in `families.base`; masks are (B, 1, h, w), or (B, 1, 1, h, w) for clips.

References:
    Huber 1964, "Robust Estimation of a Location Parameter". Charbonnier et al. 1997, "Deterministic Edge-Preserving
    Regularization in Computed Imaging" (pseudo-Huber). Khrapov et al. 2024, "Improving Diffusion Models's Data-Corruption
    Resistance using Scheduled Pseudo-Huber Loss", section 4 (delta by noise level). Hang et al. 2023, "Efficient Diffusion
    Training via Min-SNR Weighting Strategy", section 3.4. Esser et al. 2024, section 3.1 (cosmap); sigma_sqrt is from
    diffusers' `compute_loss_weighting_for_sd3`. Checked in tests/trainer/test_losses.py.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lora_api.training import LossType
from lora_trainer.families.noising import Prediction


class Loss(NamedTuple):
    """A loss as it is minimised, and as it is reported."""

    trained: Tensor  # () with gradients: weighed
    raw: Tensor  # () the same without the weights of samples


def loss_of(
    prediction_BChw: Tensor,
    target_BChw: Tensor,
    *,
    kind: LossType = "mse",
    delta: Tensor | float = 0.1,
    mask: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> Loss:
    """The loss of a batch, in fp32.

    Each sample's loss is the mean over its latent values, weighed by its mask: sum(m l) / sum(m), so that a sample with a
    small mask counts as much as one with a large. The batch's loss is the mean of weight times loss. It is not divided by
    the weights' sum: four batches of one must give what one batch of four gives.

    Args:
        prediction_BChw: What the model predicts.
        target_BChw: What it should, fp32.
        kind: `train.loss_type`.
        delta: Of huber losses; (B,), or one for all.
        mask: Weights of latent pixels, in [0, 1], not all 0 in any sample.
        weight_B: Weights of samples.
    """
    prediction_BChw = prediction_BChw.float()
    if kind == "mse" and mask is None and weight_B is None:
        loss = mse_loss(prediction_BChw, target_BChw)
        return Loss(loss, loss)
    each = values(prediction_BChw - target_BChw, kind, _beside(delta, prediction_BChw))
    if mask is None and weight_B is None:
        loss = each.mean()
        return Loss(loss, loss)
    loss_B = each.flatten(1).mean(1) if mask is None else _masked_mean(each, mask)
    raw = loss_B.mean()
    return Loss(raw if weight_B is None else (weight_B * loss_B).mean(), raw)


def values(difference: Tensor, kind: LossType, delta: Tensor | float) -> Tensor:
    """The loss of each value, from what prediction and target differ by.

    Args:
        difference: d.
        kind: `mse` d^2; `mae` |d|; `huber` d^2 / 2 up to delta, then delta (|d| - delta / 2); `smooth_l1` huber / delta;
            `pseudo_huber` sqrt(d^2 + delta^2) - delta.
        delta: Above 0, broadcast with `difference`.
    """
    if kind == "mse":
        return difference.square()
    if kind == "mae":
        return difference.abs()
    if kind == "pseudo_huber":
        squared = delta * delta
        return difference.square().add(squared).sqrt() - delta
    size = difference.abs()
    huber = torch.where(size < delta, 0.5 * size.square(), delta * (size - 0.5 * delta))
    return huber if kind == "huber" else huber / delta


def min_snr_weight(snr_B: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    """Weights (B,) that make the loss that of the picture, each noise level weighed by min(SNR, gamma).

    The error of the picture is the error of the prediction times a factor, whose square is 1 / SNR for epsilon and 1 / (SNR + 1)
    for v. For a velocity, x0 = x_t - sigma v with sigma = 1 / (1 + sqrt(SNR)), so it is 1 / (1 + sqrt(SNR))^2: the paper
    has no flow matching, this is what its argument gives there.

    Args:
        snr_B: In [0, inf].
        gamma: Above 0; 5 in the paper.
        prediction: What the model predicts.
    """
    if prediction == "epsilon":
        return (gamma / snr_B).clamp(max=1.0)
    capped_B = snr_B.clamp(max=gamma)
    return capped_B / (snr_B + 1) if prediction == "v_prediction" else capped_B / (1 + snr_B.sqrt()).square()


def sigma_weight(sigma_B: Tensor, scheme: Literal["sigma_sqrt", "cosmap"]) -> Tensor:
    """Weights (B,) of noise levels of flow matching: sigma^-2, or 2 / (pi (1 - 2 sigma + 2 sigma^2)).

    For the first, sigma is at least 1 / 1000, the lowest of the levels in the script that it is from: it has no mean otherwise.
    """
    if scheme == "sigma_sqrt":
        return sigma_B.clamp(min=1e-3) ** -2.0
    return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B**2))


def scheduled_delta(where_B: Tensor, delta: float, schedule: Literal["exponential", "snr"]) -> Tensor:
    """Deltas (B,) by noise level, from 1 at the picture down to `delta` in pure noise.

    Args:
        where_B: For `exponential` the noise level in [0, 1], for `snr` the signal-to-noise ratio in [0, inf].
        delta: In (0, 1].
        schedule: `exponential` delta^t; `snr` (1 - delta) / (1 + 1 / sqrt(SNR))^2 + delta, as the authors' code has it.
    """
    if schedule == "exponential":
        return torch.exp(math.log(delta) * where_B)
    return (1 - delta) / (1 + where_B.rsqrt()).square() + delta


def _beside(delta: Tensor | float, like: Tensor) -> Tensor | float:
    return delta.view(-1, *[1] * (like.ndim - 1)) if isinstance(delta, Tensor) else delta


def _masked_mean(each: Tensor, mask: Tensor) -> Tensor:
    """Means (B,) of values (B, C, h, w) that count as much as their mask."""
    each = each.mean(1, keepdim=True)
    mask = mask.expand_as(each)
    return (each * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)
