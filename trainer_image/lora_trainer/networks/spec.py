"""From `network` in the configuration to the layers that are changed and to peft's own configuration.

Two rules keep the result the same everywhere: layers are always named in full (a suffix like `attn.to_out` is a Linear
in one block and a list in another), and the strength of an adapter is alpha / rank for every type.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_api.config import MAX_RANK, NetworkConfig

logger = logging.getLogger(__name__)

CANDIDATES_SHOWN = 12


@dataclass(frozen=True)
class Targets:
    """Full dotted names of the layers that an adapter changes, by kind."""

    linear: tuple[str, ...]
    conv: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Both kinds."""
        return self.linear + self.conv


def check_filters(names: list[str], network: NetworkConfig) -> None:
    """Makes sure that the layer filters of `network` mean something.

    Args:
        names: Every layer that could be trained, `transformer.<dotted name>`.
        network: Its `only_if_contains` and `ignore_if_contains`.

    Raises:
        ValueError: An entry matches no layer; the message lists candidates.
    """
    for field in ("only_if_contains", "ignore_if_contains"):
        for entry in getattr(network, field):
            if not any(entry in name for name in names):
                raise ValueError(
                    f"network.{field}: {entry!r} is part of no layer name; layers are {_candidates(names)}"
                )


def resolve_targets(
    module: nn.Module, defaults: list[str], network: NetworkConfig, *, part: str = "transformer"
) -> Targets:
    """The layers of one component that `network` trains.

    Args:
        module: The component that gets the adapter.
        defaults: The family's default targets; the lists in `network` choose among these.
        network: Its `only_if_contains` keeps layers whose name contains one of its entries, its `ignore_if_contains`
            then drops. Names are matched as `transformer.<dotted name>`.
        part: Name of the component.

    Returns:
        The chosen layers in the component's order; convolutions only when `network.conv` is set.

    Raises:
        ValueError: No layers are left; the message lists candidates.
    """
    modules = dict(module.named_modules())
    unknown = [name for name in defaults if not isinstance(modules.get(name), nn.Linear | nn.Conv1d | nn.Conv2d)]
    if unknown:
        raise ValueError(f"default targets {unknown}: not linear or convolution layers of {type(module).__name__}")
    only, ignored = network.only_if_contains, network.ignore_if_contains
    chosen = [
        name
        for name in defaults
        if (not only or any(entry in f"{part}.{name}" for entry in only))
        and not any(entry in f"{part}.{name}" for entry in ignored)
    ]
    convs = tuple(name for name in chosen if not isinstance(modules[name], nn.Linear))
    if network.conv is not None and not convs:
        logger.info("network.conv: %d plays no part, the chosen layers hold no convolutions", network.conv)
    linear = tuple(name for name in chosen if isinstance(modules[name], nn.Linear))
    targets = Targets(linear, convs if network.conv is not None else ())
    if not targets.all:
        raise ValueError(
            f"network.only_if_contains and network.ignore_if_contains leave no layer to train in {part}; layers are "
            f"{_candidates(defaults)}"
        )
    return targets


def _candidates(names: list[str]) -> str:
    shown = ", ".join(names[:CANDIDATES_SHOWN])
    return shown if len(names) <= CANDIDATES_SHOWN else f"{shown} and {len(names) - CANDIDATES_SHOWN} more"


def build_peft_config(network: NetworkConfig, targets: Targets) -> Any:
    """The peft configuration of an adapter: a `LoraConfig` or a `LoKrConfig`.

    With `lokr_full_rank` both Kronecker factors are whole matrices. peft asks for a rank above every dimension then and
    still multiplies by alpha / rank, so alpha is set to that same number: scale 1.

    References:
        Hu et al. 2021, "LoRA", section 4.1; Yeh et al. 2023, "LyCORIS", section 4.2 (LoKr).
    """
    from peft import LoKrConfig, LoraConfig

    full = network.type == "lokr" and network.lokr_full_rank
    rank, alpha = (MAX_RANK, float(MAX_RANK)) if full else _rank_and_alpha(network.linear, network.linear_alpha)
    conv_rank, conv_alpha = _rank_and_alpha(network.conv or network.linear, network.conv_alpha)
    patterns: dict[str, Any] = {"target_modules": list(targets.all), "rank_pattern": {}, "alpha_pattern": {}}
    if targets.conv and not full:
        patterns["rank_pattern"] = {f"^{name}$": conv_rank for name in targets.conv}
        patterns["alpha_pattern"] = {f"^{name}$": conv_alpha for name in targets.conv}
    if network.type == "lora":
        return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=network.dropout, **patterns)
    if network.dropout:
        logger.info("network.dropout: %s plays no part with network.type: lokr", network.dropout)
    return LoKrConfig(
        r=rank,
        alpha=alpha,
        decompose_factor=network.lokr_factor,
        decompose_both=False,
        use_effective_conv2d=False,
        **patterns,
    )


def _rank_and_alpha(rank: int, alpha: float | None) -> tuple[int, float]:
    return rank, float(rank) if alpha is None else float(alpha)
