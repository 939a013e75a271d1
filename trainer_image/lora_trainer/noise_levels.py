"""Densities of noise levels: how often a sample is trained with how much noise.

A noise level u lies in (0, 1), 0 being the picture and 1 pure noise. Each density is known by its quantile function Q and
its distribution function F, so that it can be cut off and biased exactly: u = Q(p) with p uniform in [F(low), F(high)].

    logit_normal   Q(p) = sigmoid(mean + std z(p)), z the quantile of the standard normal distribution
    uniform        Q(p) = p
    mode           Q(p) = 1 - v - s (cos^2(pi v / 2) - 1 + v), v = 1 - p
    cosmap         Q(p) = 1 - 1 / (tan(pi p / 2) + 1)

The family makes its own level of u: `flow` shifts it, `unet` takes a whole step. Means above 0 are more noise, as in the
paper; diffusers' scripts count u from the other end.

References:
    Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 3.1 (equations 19
    to 21) and 5.3.2 (equation 23, the shift). The cubic bias is ai-toolkit's `content_or_style`.
    Checked in tests/trainer/test_noise_levels.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from lora_api.training import Density, TrainConfig

_HALVINGS = 60  # of an interval of length 1: to the last bit of a double
_EDGE = 2.0**-53  # nearest to 0 and 1 that quantiles are taken
_LEAST = 2.0**-24  # nearest to 0 and 1 that a level is: 1 less this is the last fp32 below 1


@dataclass(frozen=True)
class NoiseLevels:
    """A density of noise levels.

    Attributes:
        density: Its name.
        mean: Of the logit, for logit_normal.
        std: Of the logit, for logit_normal; above 0.
        scale: s of mode, in [-1, 2 / (pi - 2)], where Q rises.
        bias: `content` replaces a uniform p by 1 - p^3, which is noisy more often; `style` by p^3.
        low: Lowest level that the family trains, in [0, 1).
        high: Highest level that the family trains, in (0, 1].
    """

    density: Density = "logit_normal"
    mean: float = 0.0
    std: float = 1.0
    scale: float = 1.29
    bias: Literal["balanced", "content", "style"] = "balanced"
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, train: TrainConfig, default: Density) -> NoiseLevels:
        """What a configuration asks for.

        Args:
            train: `config.train`.
            default: The family's density, where the configuration chooses none.
        """
        return cls(
            density=train.timestep_type or default,
            mean=train.logit_mean,
            std=train.logit_std,
            scale=train.mode_scale,
            bias=train.content_or_style,
            low=train.min_timestep / 1000,
            high=train.max_timestep / 1000,
        )

    @property
    def is_cut(self) -> bool:
        """Whether a part of the levels is left out."""
        return self.low > 0 or self.high < 1

    def draw(self, generator: torch.Generator, shift: float = 1.0) -> Tensor:
        """One u, () fp32 on the CPU.

        Args:
            generator: One number is taken from it.
            shift: k of the family's shift k u / (1 + (k - 1) u); `low` and `high` hold after it.
        """
        if self.bias == "balanced" and not self.is_cut:
            if self.density == "uniform":
                return torch.rand((), generator=generator, dtype=torch.float32)
            if self.density == "logit_normal":
                z = torch.randn((), generator=generator, dtype=torch.float32)
                return (z if (self.mean, self.std) == (0.0, 1.0) else self.mean + self.std * z).sigmoid()
        p = float(torch.rand((), generator=generator, dtype=torch.float64))
        if self.bias != "balanced":
            p = p**3 if self.bias == "style" else 1 - p**3
        first, last = _shares(self, shift)
        u = self.quantile(first + p * (last - first))
        return torch.tensor(min(max(u, _LEAST), 1 - _LEAST), dtype=torch.float32)

    def quantile(self, p: float) -> float:
        """The level below which a share p of the density lies, before cut and bias."""
        if self.density == "logit_normal":
            z = NormalDist().inv_cdf(min(max(p, _EDGE), 1 - _EDGE))
            return 1 / (1 + math.exp(-(self.mean + self.std * z)))
        if self.density == "mode":
            v = 1 - p
            return 1 - v - self.scale * (math.cos(math.pi * v / 2) ** 2 - 1 + v)
        if self.density == "cosmap":
            return 1 - 1 / (math.tan(math.pi * min(p, 1 - _EDGE) / 2) + 1)
        return p

    def share_below(self, level: float) -> float:
        """The share of the density below a level: the inverse of `quantile`."""
        if level <= 0 or level >= 1:
            return min(max(level, 0.0), 1.0)
        if self.density == "logit_normal":
            return NormalDist(self.mean, self.std).cdf(math.log(level / (1 - level)))
        if self.density == "cosmap":
            return 2 / math.pi * math.atan(level / (1 - level))
        if self.density == "mode":
            return self._halved(level)
        return level

    def _halved(self, level: float) -> float:
        """`share_below` of a quantile function that has no inverse in closed form."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.quantile(middle) < level else (low, middle)
        return high


@lru_cache(maxsize=1024)
def _shares(levels: NoiseLevels, shift: float) -> tuple[float, float]:
    """The shares of a density below the lowest and the highest level, which are those after the shift."""
    return levels.share_below(unshifted(levels.low, shift)), levels.share_below(unshifted(levels.high, shift))


def shifted(u: float, shift: float) -> float:
    """The level that a shift k makes of u: k u / (1 + (k - 1) u)."""
    return shift * u / (1 + (shift - 1) * u)


def unshifted(level: float, shift: float) -> float:
    """The u that `shifted` makes a level of."""
    return level / (shift - (shift - 1) * level)
