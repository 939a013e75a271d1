"""Prodigy: AdamW that estimates its own rate d from how far the parameters have come.

Own code, because the libraries' (prodigyopt, pytorch-optimizer) know one rate for all groups, fail on parameters whose
first gradient comes late (the second expert of Wan 2.2), and launch a dozen kernels for each small matrix.
Where theirs work, this one gives the same numbers: tests/trainer/test_prodigy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import (
    Tensor,
    _foreach_norm,
    _foreach_sqrt,
    _foreach_sub,
)  # torch.optim is built on these, and they have no other names

_STATE = ("p0", "s", "exp_avg", "exp_avg_sq")


class Prodigy(torch.optim.Optimizer):
    """Prodigy in its Adam form.

    Groups of other rates (`lr_scale` c of a group) are the same algorithm in the variables x / c: their steps are c times
    as long, and their part of the estimate's denominator counts c-fold.

    Args:
        params: Parameters or groups.
        lr: Factor on the estimated rate.
        betas: Decay of both moments; the estimate decays with the root of the second.
        eps: Added to the denominator, in units of d.
        weight_decay: Decoupled, in proportion to the rate.
        d_coef: Factor on the estimate.
        d0: First estimate.
        use_bias_correction: Whether Adam's bias correction is applied.
        safeguard_warmup: Whether `lr` is left out of the estimate's denominator.

    Attributes:
        d_used: The estimate that the last update was made with.

    References:
        Mishchenko & Defazio 2024, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", algorithm 4.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter] | list[dict[str, Any]],
        *,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        d_coef: float = 1.0,
        d0: float = 1e-6,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "lr_scale": 1.0, "betas": betas, "eps": eps, "weight_decay": weight_decay, "d_coef": d_coef,
            "d0": d0, "use_bias_correction": use_bias_correction, "safeguard_warmup": safeguard_warmup,
            "d": d0, "d_numerator": 0.0, "k": 0,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.d_used = d0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update, with one wait for the device: for the new estimate.

        Raises:
            ValueError: When a closure is given.
        """
        if closure is not None:
            raise ValueError("Prodigy takes no closure")
        first = self.param_groups[0]
        rate = first["d"] * first["lr"] / first["lr_scale"] * _bias_correction(first)
        numerator, denominator = self._gather(rate)
        if denominator == 0:
            return  # no gradient anywhere
        self.d_used = first["d"]
        d = max(first["d"], first["d_coef"] * numerator / denominator)  # it never falls
        news = {"d": d, "d_numerator": numerator, "k": first["k"] + 1}
        for group in self.param_groups:
            own, _, states = self._with_gradients(group)
            if own:
                own_rate = rate * group["lr_scale"]
                if group["weight_decay"]:
                    torch._foreach_mul_(own, 1.0 - group["weight_decay"] * own_rate)
                bases = _foreach_sqrt([state["exp_avg_sq"] for state in states])
                torch._foreach_add_(bases, d * group["eps"])
                torch._foreach_addcdiv_(own, [state["exp_avg"] for state in states], bases, value=-own_rate)
            group.update(news)

    def _gather(self, rate: float) -> tuple[float, float]:
        """Takes the gradients into moments and sums; returns numerator and denominator of the estimate."""
        first = self.param_groups[0]
        beta1, beta2 = first["betas"]
        beta3, d, d0 = math.sqrt(beta2), first["d"], first["d0"]
        come, sums = [], []
        for group in self.param_groups:
            own, gradients, states = self._with_gradients(group)
            if not own:
                continue
            ways = _foreach_sub([state["p0"] for state in states], own)
            come += [torch.dot(g.flatten(), way.flatten()) for g, way in zip(gradients, ways, strict=True)]
            averages, squares, s = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "s"))
            torch._foreach_mul_(averages, beta1)
            torch._foreach_add_(averages, gradients, alpha=d * (1.0 - beta1))
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, value=d * d * (1.0 - beta2))
            torch._foreach_mul_(s, beta3)
            torch._foreach_add_(s, gradients, alpha=d / d0 * (d if group["safeguard_warmup"] else rate))
            sums += [norm * group["lr_scale"] for norm in _foreach_norm(s, 1)]
        if not come:
            return first["d_numerator"] * beta3, 0.0
        way, total = torch.stack((torch.stack(come).sum(), torch.stack(sums).sum())).tolist()
        return first["d_numerator"] * beta3 + d / d0 * rate * way, total

    def _with_gradients(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
        own = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in own:
            if not self.state[parameter]:
                zeros = {key: torch.zeros_like(parameter) for key in _STATE[1:]}
                self.state[parameter] = {"p0": parameter.detach().clone(), **zeros}
        return own, [parameter.grad for parameter in own], [self.state[parameter] for parameter in own]


def _bias_correction(group: dict[str, Any]) -> float:
    if not group["use_bias_correction"]:
        return 1.0
    (beta1, beta2), k = group["betas"], group["k"] + 1
    return float(math.sqrt(1.0 - beta2**k) / (1.0 - beta1**k))
