"""Adapters as files know them: which factors go into which file, and the configuration that peft reads beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lora_api.network import MAX_RANK
from lora_trainer.networks.factors import Factors


def file_config(
    kind: str, layers: Mapping[str, tuple[int, float]], *, factor: int = -1, lead: str = ""
) -> dict[str, Any]:
    """The peft configuration of a file's layers, as plain data with only what a reader needs.

    Fields that a reader of another version might not know are left out: loaders hand all of them to a constructor.

    Args:
        kind: lora, dora, loha or lokr.
        layers: Rank and alpha of each layer, by its full dotted name.
        factor: `network.lokr_factor`.
        lead: What readers of another version may have in front of these names.
    """
    start = rf"^({re.escape(lead)})?" if lead else "^"
    (rank, alpha), _ = Counter(layers.values()).most_common(1)[0]
    ranks = {f"{start}{name}$": r for name, (r, _) in layers.items() if r != rank}
    alphas = {f"{start}{name}$": a for name, (r, a) in layers.items() if a != alpha or r != rank}
    shared: dict[str, Any] = {
        "r": rank,
        "target_modules": sorted(layers),
        "rank_pattern": ranks,
        "alpha_pattern": {name: _plain(value) for name, value in alphas.items()},
    }
    if kind == "lora":
        return {**shared, "lora_alpha": _plain(alpha)}
    if kind == "dora":
        return {**shared, "lora_alpha": _plain(alpha), "use_dora": True}
    shared |= {"alpha": _plain(alpha), "use_effective_conv2d": False}
    return shared if kind == "loha" else {**shared, "decompose_both": False, "decompose_factor": factor}


def _plain(alpha: float) -> float | int:
    return int(alpha) if alpha == int(alpha) else alpha


def rank_and_alpha(factors: Factors) -> tuple[int, float]:
    """Rank and alpha of baked factors: equal, so that the scale is one."""
    rank = factors.rank or MAX_RANK
    return rank, float(rank)


def peft_config_file(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of peft's `adapter_config.json`."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    classes: dict[str, Any] = {"lora": LoraConfig, "dora": LoraConfig, "loha": LoHaConfig, "lokr": LoKrConfig}
    plain = classes[kind](**config).to_dict()
    plain["inference_mode"] = True
    return {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(plain.items())}
