"""What the types of adapters are, as formulas: the change of one layer's weight, and the same change in other factors.

Legend: W weight of a layer, its convolution kernel folded into the inputs; m outputs and n inputs of W; r rank; s scale
alpha / rank.

- lora: DeltaW = s B A, with B (m, r) and A (r, n).
- dora: W + DeltaW = magnitude (W + s B A) / |W + s B A|, with norms over the inputs of each output.
- loha: DeltaW = s (w1_a w1_b) o (w2_a w2_b), factors (m, r) and (r, n), o elementwise.
- lokr: DeltaW = s kron(W1, W2), either factor whole or as a product of two.
- dense: DeltaW itself, called `diff` in files.

References:
    Hu et al. 2021, "LoRA", section 4.1. Liu et al. 2024, "DoRA", section 4.2. Hyeon-Woo et al. 2022, "FedPara",
    section 2.2 (loha). Yeh et al. 2023, "LyCORIS", sections 3.2 and 3.3. Checked in tests/trainer/test_factors.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["lora", "dora", "loha", "lokr", "dense"]

MAGNITUDE = "lora_magnitude_vector"
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"

ZERO_AT_START = {"lora_B", "lokr_w2", "lokr_w2_b", "hada_w2_a"}
"""Factors that start at zero, so that DeltaW is zero and the first output is the base model's."""

GAUSSIAN_AT_START = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}
"""Standard deviations of the factors that LyCORIS draws from a normal distribution; all others are Kaiming-uniform."""


@dataclass(frozen=True)
class Factors:
    """The change of one layer.

    Attributes:
        kind: Which formula.
        tensors: Its factors by the names that peft gives them (`lora_A.weight`, `lokr_w1`, ...; `diff` if dense).
        scale: s of the formula.
        shape: Of the layer's weight.
    """

    kind: Kind
    tensors: Mapping[str, Tensor]
    scale: float
    shape: tuple[int, ...]

    @property
    def rank(self) -> int | None:
        """The r of the formula; None where all factors are whole."""
        for name, axis in ((LORA_A, 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
            if name in self.tensors:
                return self.tensors[name].shape[axis]
        return None

    def delta(self, weight: Tensor | None = None) -> Tensor:
        """DeltaW, fp32, shaped like the weight.

        Args:
            weight: W, needed for dora only.
        """
        if self.kind != "dora":
            return self.product().reshape(self.shape)
        assert weight is not None, "the change of dora depends on the weight"
        base_mn = weight.detach().float().cpu().flatten(1)
        changed_mn = base_mn + self.product()
        magnitude_m1 = self.tensors[MAGNITUDE].float().reshape(-1, 1)
        result = magnitude_m1 * changed_mn / changed_mn.norm(dim=1, keepdim=True) - base_mn
        delta: Tensor = result.reshape(self.shape)
        return delta

    def product(self) -> Tensor:
        """What is added to the weight, (m, n); for dora before the magnitudes are set."""
        t = {name: tensor.float() for name, tensor in self.tensors.items()}
        if self.kind == "dense":
            return t["diff"].flatten(1) * self.scale
        if self.kind in ("lora", "dora"):
            return self.scale * (t[LORA_B].flatten(1) @ t[LORA_A].flatten(1))
        if self.kind == "loha":
            return (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"]) * self.scale
        return torch.kron(whole(t, "lokr_w1"), whole(t, "lokr_w2")) * self.scale

    def baked(self) -> Factors:
        """The same with s folded into one factor: means the same in programs that read no alpha."""
        if self.scale == 1.0:
            return self
        into = next(n for n in (LORA_B, "lokr_w1", "lokr_w1_a", "hada_w1_a", "diff") if n in self.tensors)
        return replace(self, tensors={**self.tensors, into: self.tensors[into] * self.scale}, scale=1.0)

    def as_lora(self, weight: Tensor | None = None) -> Factors:
        """Exactly the same change as lora with s = 1, of the smallest rank that its formula shows.

        loha: (sum_k a_k b_k) o (sum_l c_l d_l) = sum_kl (a_k o c_l)(b_k o d_l), rank r^2. lokr with W2 = P Q:
        kron(W1, P Q) = kron(W1, P) kron(1, Q) = kron(1, P) kron(W1, Q). Where that is no less than the layer's smaller
        side, DeltaW itself stands beside an identity.
        """
        pair = self._pair()
        m, n = self.shape[0], math.prod(self.shape[1:])
        if pair is None or pair[0].shape[1] >= min(m, n):
            delta_mn = self.delta(weight).flatten(1)
            pair = (torch.eye(m), delta_mn) if m <= n else (delta_mn, torch.eye(n))
        b_mr, a_rn = pair
        ones = (1,) * (len(self.shape) - 2)
        tensors = {LORA_A: a_rn.reshape(-1, *self.shape[1:]), LORA_B: b_mr.reshape(m, -1, *ones)}
        return Factors("lora", {name: t.contiguous() for name, t in tensors.items()}, 1.0, self.shape)

    def as_dense(self, weight: Tensor | None = None) -> Factors:
        """DeltaW itself."""
        return Factors("dense", {"diff": self.delta(weight)}, 1.0, self.shape)

    def _pair(self) -> tuple[Tensor, Tensor] | None:
        """B (m, r) and A (r, n) with DeltaW = B A; None where the formula shows none."""
        t = {name: tensor.float() for name, tensor in self.tensors.items()}
        if self.kind == "lora":
            return t[LORA_B].flatten(1) * self.scale, t[LORA_A].flatten(1)
        if self.kind == "loha":
            b = torch.einsum("mk,ml->mkl", t["hada_w1_a"], t["hada_w2_a"]).flatten(1)
            return b * self.scale, torch.einsum("kn,ln->kln", t["hada_w1_b"], t["hada_w2_b"]).flatten(0, 1)
        if self.kind != "lokr" or "lokr_w2_b" not in t:
            return None
        w1, p, q = whole(t, "lokr_w1"), t["lokr_w2_a"], t["lokr_w2_b"]
        if w1.shape[1] <= w1.shape[0]:
            return torch.kron(w1, p) * self.scale, torch.kron(torch.eye(w1.shape[1]), q)
        return torch.kron(torch.eye(w1.shape[0]), p) * self.scale, torch.kron(w1, q)


def whole(tensors: Mapping[str, Tensor], factor: str) -> Tensor:
    """A Kronecker factor as a matrix, whole or multiplied out."""
    if factor in tensors:
        return tensors[factor].flatten(1)
    return tensors[f"{factor}_a"] @ tensors[f"{factor}_b"]


def start_value(factor: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A fresh factor of that shape, fp32 on the CPU.

    Args:
        factor: Its name without layer, such as `lora_A` or `hada_w1_b`.
        shape: Its shape.
        generator: On the CPU.
    """
    value = torch.zeros(shape)
    if factor in ZERO_AT_START:
        return value
    if factor in GAUSSIAN_AT_START:
        return value.normal_(0, GAUSSIAN_AT_START[factor], generator=generator)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)


def stacked(parts: list[Factors]) -> Factors | None:
    """The lora of a layer whose outputs are those of several layers one below the other; None if it is not a lora.

    A = [A1; A2; ...], B = blockdiag(B1, B2, ...).
    """
    if any(part.kind != "lora" for part in parts):
        return None
    baked = [part.baked() for part in parts]
    a = torch.cat([part.tensors[LORA_A].float() for part in baked])
    b = torch.block_diag(*(part.tensors[LORA_B].float().flatten(1) for part in baked))  # type: ignore[no-untyped-call]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Factors("lora", {LORA_A: a, LORA_B: b.reshape(*b.shape, *(1,) * (len(shape) - 2))}, 1.0, shape)
