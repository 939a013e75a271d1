"""Noise levels and losses: what they mean there, in our words."""

from __future__ import annotations

import math
from statistics import NormalDist

from lora_api.aitoolkit.findings import Block
from lora_api.archs import DYNAMIC_SHIFT_ARCHS
from lora_api.suggestions import choices_of
from lora_api.training import TrainConfig
from lora_api.wording import short

UNETS = frozenset({"sd1", "sd15", "sd2", "sdxl"})
"""Their values of `model.arch` that are DDPMs, and for which alpha is honoured there."""

STATIC_SHIFT = ("zimage", "wan")
"""Their families that are sampled with a static shift, and trained there without it unless `timestep_type` is `shift`."""

PSEUDO_HUBER_DELTA = 0.01  # theirs is written into the program

_SHIFTED = ("shift", "flux_shift", "lumina2_shift")  # one and the same there
_DENSITIES = {
    "sigmoid": "logit_normal",
    "linear": "uniform",
    "weighted": "uniform",
    **dict.fromkeys(_SHIFTED, "uniform"),
}
_ADVICE = {
    "lognorm_blend": "it depends on the largest of 750 numbers drawn at random; use logit_normal with a logit_mean above 0",
    "next_sample": "it trains one step of sampling after the other; use shift",
    "one_step": "it trains one noise level; use min_timestep and max_timestep",
    "two_step": "it trains two noise levels; use linear",
    "four_step": "it trains four noise levels; use linear",
    "eight_step": "it trains eight noise levels; use linear",
}


def read_objective(block: Block, arch: str) -> None:
    """`timestep_type` and what belongs to it, and the loss."""
    kind = None if arch in UNETS else _density(block, arch)
    if arch in UNETS:
        block.take("timestep_type")  # counts for flow matching only, there as well
    _range(block, kind)
    if block.peek("loss_type") == "pseudo_huber":
        block.default("huber_delta", PSEUDO_HUBER_DELTA)
    if not block.peek("min_snr_gamma"):
        block.take("min_snr_gamma")  # 0 is off there


def read_masks(block: Block) -> None:
    """Masks of a dataset; what says how to read them counts only where there are some."""
    if not block.peek("mask_path"):
        block.take("mask_path")
    if not block.peek("mask_path") and not block.peek("alpha_mask"):
        for key in ("invert_mask", "mask_min_value"):
            block.take(key)


def _density(block: Block, arch: str) -> str:
    """The density in our words; the shift that it has there is written out where the model's own would count here."""
    kind = block.take("timestep_type") or "sigmoid"
    ours = choices_of(TrainConfig, "timestep_type")
    if kind == "weighted":
        block.note(
            "train.timestep_type: weighted draws noise levels uniformly and weighs the loss by a table that was measured on "
            "one model; here it is uniform, and the weights are ignored"
        )
    if kind not in (*ours, *_DENSITIES):
        words = ", ".join(dict.fromkeys((*_DENSITIES, *ours)))
        advice = f"; {_ADVICE[kind]}" if kind in _ADVICE else f"; expected one of {words}"
        block.problem("timestep_type", f"{short(kind)} has no counterpart here{advice}")
    elif kind in _SHIFTED:
        if _ours(arch) in DYNAMIC_SHIFT_ARCHS:
            block.out["timestep_dynamic_shift"] = True
    elif kind not in ours and arch.startswith(STATIC_SHIFT):
        block.default("timestep_shift", 1)
    block.out["timestep_type"] = _DENSITIES.get(kind, kind)
    return str(kind)


def _ours(arch: str) -> str:
    return {"flux": "flux1", "flux2": "flux2_dev"}.get(arch, arch)


def _range(block: Block, kind: str | None) -> None:
    """Their range counts 1000 steps from the noisiest on, along the density; ours are noise levels."""
    first, last = block.take("min_denoising_steps") or 0, block.take("max_denoising_steps")
    last = 1000 if last is None or last >= 999 else last
    if (first, last) == (0, 1000):
        return
    if not 0 <= first < last:
        block.problem("min_denoising_steps", f"{short(first)} must be below max_denoising_steps, {short(last)}")
        return
    low, high = (_level(1 - steps / 1000, kind) for steps in (last, first))
    if kind in _SHIFTED:
        block.problem(
            "max_denoising_steps",
            f"with timestep_type {kind} it depends on the picture; use max_timestep and min_timestep",
        )
        return
    block.out |= {"min_timestep": low, "max_timestep": high}
    block.note(
        f"train.min_denoising_steps: {first} to {last} of 1000 steps from pure noise on are noise levels {low:g} to {high:g} of 1000 here"
    )


def _level(share: float, kind: str | None) -> float:
    """The noise level, of 1000, below which a share of the density lies."""
    if kind != "sigmoid" or not 0 < share < 1:
        return round(1000 * share, 1)
    return round(1000 / (1 + math.exp(-NormalDist().inv_cdf(share))), 1)
