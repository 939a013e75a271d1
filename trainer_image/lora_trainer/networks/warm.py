"""Warm start: an adapter that begins with the change that an earlier one made.

What is kept is DeltaW, not its factors. The same type and rank are copied; a higher rank is padded with parts that
change nothing yet; the denoiser's own weights take anything. Where the new factors can't express the old change it is
brought as near as they can come (a truncated singular value decomposition, or the nearest Kronecker product), and how
far off that is, is reported.

Shapes as in `factors`.

References:
    Eckart & Young 1936 (truncation is the nearest matrix of a rank). Van Loan & Pitsianis 1993, "Approximation with
    Kronecker products", section 2. Checked in tests/trainer/test_init_from.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.networks.adapter import Adapter
from lora_trainer.networks.factors import LORA_A, LORA_B, MAGNITUDE, Factors
from lora_trainer.networks.full import FullFineTune
from lora_trainer.networks.reading import read_factors
from lora_trainer.networks.trainable import Trainable

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

logger = logging.getLogger(__name__)

EXACT = 1e-5
"""Relative errors below this are rounding."""

_PADDED = {LORA_B: 1, LORA_A: 0, "lokr_w2_a": 1, "lokr_w2_b": 0} | {
    f"hada_w{i}_{x}": a for i in (1, 2) for x, a in (("a", 1), ("b", 0))
}
"""Axis of the rank, for each factor that has one; of each pair one is padded with zeros, the other keeps fresh values."""
_ZEROS = {LORA_B, "lokr_w2_a", "hada_w1_a", "hada_w2_a"}


@dataclass(frozen=True)
class WarmStart:
    """What a warm start did.

    Attributes:
        layers: How many layers begin with a change.
        relative_error: |new DeltaW - old DeltaW| / |old DeltaW| over all layers.
        worst: The layer with the largest such error.
        worst_error: That error.
    """

    layers: int
    relative_error: float
    worst: str
    worst_error: float


def warm_start(model: BaseModel, trained: Trainable, file: Path) -> WarmStart:
    """Gives a fresh adapter (or denoiser) the change that an adapter file makes.

    Args:
        model: The base model that holds `trained`.
        trained: As `add_adapter` or `train_all` returned it.
        file: An adapter of the same base model, of any tool and type.

    Raises:
        ValueError: The file can't be read as an adapter of this model, changes layers that are not trained now, has no
            effect, or its change can't be expressed by the new type at all.
    """
    sources = read_factors(file, model, trained.parts)
    trainable = set(trained.modules)
    if lost := sorted(sources.keys() - trainable):
        raise ValueError(
            f"network.init_from: {file} changes {len(sources)} layers, of which {len(lost)} are not trained by this "
            f"network: {', '.join(lost[:3])}; let network train them too"
        )
    errors: dict[str, tuple[float, float]] = {}
    for name, source in sources.items():
        if not isinstance(trained, Adapter | FullFineTune):
            raise TypeError(type(trained))
        wanted = source.delta(trained.weight(name))
        if isinstance(trained, FullFineTune):
            trained.add(name, wanted)
            errors[name] = (0.0, float(wanted.norm()))
        else:
            _take_over(trained, name, source, wanted)
            found = trained.delta_weight(name)
            errors[name] = (float((found - wanted).norm()), float(wanted.norm()))
    return _report(file, errors)


def _report(file: Path, errors: Mapping[str, tuple[float, float]]) -> WarmStart:
    size = math.sqrt(sum(norm**2 for _, norm in errors.values()))
    if size == 0 or not math.isfinite(size):
        raise ValueError(
            f"network.init_from: {file} has no effect: the change it makes is {'zero' if size == 0 else size}"
        )
    off = math.sqrt(sum(error**2 for error, _ in errors.values()))
    worst = max(errors, key=lambda name: errors[name][0] / (errors[name][1] or 1.0))
    result = WarmStart(len(errors), off / size, worst, errors[worst][0] / (errors[worst][1] or 1.0))
    if result.relative_error < EXACT:
        logger.info("network.init_from: %s gives its change to %d layers exactly", file, result.layers)
    else:
        logger.warning(
            "network.init_from: %s changes %d layers in a way that this network can't express; it begins with the nearest "
            "change, relative error %.3g (worst: %s, %.3g)",
            file, result.layers, result.relative_error, result.worst, result.worst_error,
        )  # fmt: skip
    return result


def _take_over(adapter: Adapter, name: str, source: Factors, wanted: Tensor) -> None:
    target = adapter.factors(name)
    padded = _padded(source, target)
    if padded is not None:
        adapter.set_factors(name, padded)
        return
    if target.kind in ("lora", "dora"):
        plain = Factors("lora", source.tensors, source.scale, source.shape) if source.kind == "lora" else None
        sum_mn = wanted.flatten(1) if plain is None else None
        fitted = _nearest_lora(plain, sum_mn, target)
        if target.kind == "dora":
            fitted[MAGNITUDE] = (adapter.weight(name).float().cpu() + wanted).flatten(1).norm(dim=1)
        adapter.set_factors(name, fitted)
    elif target.kind == "lokr":
        adapter.set_factors(name, _nearest_lokr(wanted.flatten(1), target))
    else:
        raise ValueError(
            f"network.init_from: the change of {name} is {source.kind} of rank {source.rank}, which can't be turned into "
            f"loha of rank {target.rank}; loha begins only with loha of no higher rank. Choose another network.type"
        )


def _padded(source: Factors, target: Factors) -> dict[str, Tensor] | None:
    """The target's factors with the source's inside; None where type, shapes or ranks don't allow it."""
    if source.kind != target.kind or source.tensors.keys() != target.tensors.keys():
        return None
    result: dict[str, Tensor] = {}
    for key, fresh in target.tensors.items():
        held = source.tensors[key]
        if key == MAGNITUDE or (held.ndim > 1 and held.flatten(1).shape == fresh.flatten(1).shape):
            held = held.reshape(fresh.shape)
        axis = _PADDED.get(key)
        if held.ndim != fresh.ndim or any(
            h != f and (i != axis or h > f) for i, (h, f) in enumerate(zip(held.shape, fresh.shape, strict=True))
        ):
            return None
        value = torch.zeros_like(fresh) if key in _ZEROS else fresh.clone()
        value[tuple(slice(0, size) for size in held.shape)] = held
        result[key] = value
    if source.scale != target.scale:
        into = next(key for key in (LORA_B, "lokr_w1", "hada_w1_a") if key in result)
        result[into] = result[into] * (source.scale / target.scale)
    return result


def _nearest_lora(source: Factors | None, delta_mn: Tensor | None, target: Factors) -> dict[str, Tensor]:
    """B and A of the target's rank whose product is nearest; a source that is a lora is never multiplied out."""
    if source is not None:
        q_b, r_b = torch.linalg.qr(source.tensors[LORA_B].flatten(1) * source.scale)
        q_a, r_a = torch.linalg.qr(source.tensors[LORA_A].flatten(1).T)
        u, s, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
        u_mr, v_rn = q_b @ u, v @ q_a.T
    else:
        assert delta_mn is not None
        u_mr, s, v_rn = torch.linalg.svd(delta_mn, full_matrices=False)
    rank = target.rank or 0
    keep = min(rank, len(s))
    root = (s[:keep] / target.scale).sqrt()
    b, a = torch.zeros(target.shape[0], rank), target.tensors[LORA_A].flatten(1).clone()
    b[:, :keep] = u_mr[:, :keep] * root
    a[:keep] = root[:, None] * v_rn[:keep]
    return {LORA_A: a, LORA_B: b}


def _nearest_lokr(delta_mn: Tensor, target: Factors) -> dict[str, Tensor]:
    """The nearest Kronecker product: the best rank-one matrix of DeltaW with its blocks laid out as rows."""
    m1, n1 = target.tensors["lokr_w1"].shape
    m2, n2 = delta_mn.shape[0] // m1, delta_mn.shape[1] // n1
    rows = delta_mn.reshape(m1, m2, n1, n2).permute(0, 2, 1, 3).reshape(m1 * n1, m2 * n2)
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    w1, w2 = u[:, 0].reshape(m1, n1) * (s[0].sqrt() / target.scale), v[0].reshape(m2, n2) * s[0].sqrt()
    if "lokr_w2" in target.tensors:
        return {"lokr_w1": w1, "lokr_w2": w2}
    inner = Factors("lora", {LORA_A: target.tensors["lokr_w2_b"]}, 1.0, (m2, n2))
    fitted = _nearest_lora(None, w2, inner)
    return {"lokr_w1": w1, "lokr_w2_a": fitted[LORA_B], "lokr_w2_b": fitted[LORA_A]}
