"""From `network` in the configuration to the layers that are changed, and how each of them is.

Two rules keep the result the same everywhere: layers are always named in full (a suffix like `attn.to_out` is a Linear
in one block and a list in another), and the strength of an adapter is alpha / rank for every type.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from lora_api.network import MAX_RANK, ModuleRule, NetworkConfig
from lora_trainer.families.parts import Part, by_part, part_of

logger = logging.getLogger(__name__)

CANDIDATES_SHOWN = 12


@dataclass(frozen=True)
class Targets:
    """Names, in the trainer, of the layers that an adapter changes, by kind."""

    linear: tuple[str, ...]
    conv: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Both kinds."""
        return self.linear + self.conv


@dataclass(frozen=True)
class Layer:
    """One layer and what is done to it.

    Attributes:
        name: Its name in the trainer, or inside its component.
        kind: Adapter type.
        rank: r; MAX_RANK for whole Kronecker factors.
        alpha: The scale is alpha / rank.
        lr: Its own learning rate; None: that of the job.
        frozen: Keeps what a warm start gives it.
    """

    name: str
    kind: Literal["lora", "dora", "loha", "lokr"]
    rank: int
    alpha: float
    lr: float | None = None
    frozen: bool = False


def resolve_targets(parts: Sequence[Part], network: NetworkConfig) -> Targets:
    """The layers that `network` trains.

    Args:
        parts: The components that get adapters; the lists in `network` choose among their targets.
        network: Its `only_if_contains` keeps layers whose name contains one of its entries, its `ignore_if_contains`
            then drops. Names are matched with their component in front, `transformer.<dotted name>`.

    Returns:
        The chosen layers in the order of the parts; convolutions only when `network.conv` is set.

    Raises:
        ValueError: An entry matches no layer, or none are left; the message lists candidates.
    """
    modules = {f"{part.prefix}{name}": module for part in parts for name, module in _target_modules(part)}
    chosen = filter_names(list(modules), network, parts)
    convs = tuple(name for name in chosen if not isinstance(modules[name], nn.Linear))
    if network.conv is not None and not convs:
        logger.info("network.conv: %d plays no part, the chosen layers hold no convolutions", network.conv)
    linear = tuple(name for name in chosen if isinstance(modules[name], nn.Linear))
    targets = Targets(linear, convs if network.conv is not None else ())
    with_layers = [part for part, _ in by_part(parts, targets.all)]
    empty = [part for part in parts if part.encodes_text and part not in with_layers]
    if empty or not targets.all:
        where = f" in {empty[0].name}" if empty else ""
        raise ValueError(
            f"network.only_if_contains and network.ignore_if_contains leave no layer to train{where}; layers are "
            f"{_candidates(list(modules))}"
        )
    return targets


def _target_modules(part: Part) -> list[tuple[str, nn.Module]]:
    modules = dict(part.module.named_modules())
    unknown = [n for n in part.targets if not isinstance(modules.get(n), nn.Linear | nn.Conv1d | nn.Conv2d)]
    if unknown:
        raise ValueError(f"default targets {unknown}: not linear or convolution layers of {type(part.module).__name__}")
    return [(name, modules[name]) for name in part.targets]


def filter_names(names: list[str], network: NetworkConfig, parts: Sequence[Part]) -> list[str]:
    """The names that both lists of `network` let through.

    Raises:
        ValueError: An entry is part of no name; the message lists candidates.
    """
    full = {name: part_of(parts, name).full(name) for name in names}
    for field in ("only_if_contains", "ignore_if_contains"):
        for entry in getattr(network, field):
            if not any(entry in name for name in full.values()):
                raise ValueError(
                    f"network.{field}: {entry!r} is part of no layer name; layers are {_candidates(names)}"
                )
    only, ignored = network.only_if_contains, network.ignore_if_contains
    return [
        name
        for name in names
        if (not only or any(entry in full[name] for entry in only))
        and not any(entry in full[name] for entry in ignored)
    ]


def rule_for_each(
    names: list[str], rules: tuple[ModuleRule, ...], parts: Sequence[Part], *, keep_frozen: bool = False
) -> dict[str, ModuleRule | None]:
    """The first rule whose pattern matches each name; frozen names are left out, unless they are to be kept.

    Raises:
        ValueError: A rule matches nothing, or only what rules before it took, or everything is frozen.
    """
    taken: dict[str, int] = {}
    for number, rule in enumerate(rules):
        matching = [name for name in names if _matches(part_of(parts, name), name, rule.match)]
        if not matching:
            raise ValueError(
                f"network.modules[{number}].match: {rule.match!r} matches no layer; layers are {_candidates(names)}"
            )
        if all(name in taken for name in matching):
            raise ValueError(
                f"network.modules[{number}].match: {rule.match!r} is never reached, rules before it take all of its "
                f"{len(matching)} layers; put it in front of them"
            )
        for name in matching:
            taken.setdefault(name, number)
    found = {name: rules[taken[name]] if name in taken else None for name in names}
    left = {name: rule for name, rule in found.items() if rule is None or not rule.freeze}
    if not left:
        raise ValueError(
            "network.modules: freeze all layers, so nothing would be trained; let one rule match fewer layers"
        )
    return found if keep_frozen else left


def _matches(part: Part, name: str, pattern: str) -> bool:
    """Whether a pattern means a layer, with or without the component in front."""
    return fnmatchcase(part.full(name), pattern) or fnmatchcase(part.full(name).removeprefix(f"{part.name}."), pattern)


def plan_layers(parts: Sequence[Part], network: NetworkConfig) -> tuple[Layer, ...]:
    """What is done to each layer that `network` trains, and to frozen ones where they may begin with a change to keep.

    Raises:
        ValueError: A filter or a pattern matches nothing, or no layer is left.
    """
    targets = resolve_targets(parts, network)
    rules = rule_for_each(list(targets.all), network.modules, parts, keep_frozen=network.init_from is not None)
    convs = set(targets.conv)
    return tuple(_layer(name, network, rule, is_conv=name in convs) for name, rule in rules.items())


def _layer(name: str, network: NetworkConfig, rule: ModuleRule | None, *, is_conv: bool) -> Layer:
    own = rule or ModuleRule(match="*")
    kind = own.type or network.type
    assert kind != "full", "full fine-tuning has no adapter layers"
    if kind == "lokr" and network.lokr_full_rank:
        return Layer(name, kind, MAX_RANK, float(MAX_RANK), own.lr, own.freeze)
    if is_conv:
        assert network.conv is not None
        return Layer(name, kind, network.conv, float(network.conv_alpha or network.conv), own.lr, own.freeze)
    rank = own.linear or network.linear
    alpha = own.linear_alpha or (None if own.linear else network.linear_alpha)
    return Layer(name, kind, rank, float(alpha or rank), own.lr, own.freeze)


def _candidates(names: list[str]) -> str:
    shown = ", ".join(names[:CANDIDATES_SHOWN])
    return shown if len(names) <= CANDIDATES_SHOWN else f"{shown} and {len(names) - CANDIDATES_SHOWN} more"


def build_peft_configs(layers: tuple[Layer, ...], network: NetworkConfig) -> list[Any]:
    """The configurations for peft, one for all layers of the same type, rank and alpha.

    With `lokr_full_rank` both Kronecker factors are whole matrices. peft asks for a rank above every dimension then and
    still multiplies by alpha / rank, so alpha is set to that same number: scale 1.
    """
    groups: dict[tuple[str, int, float], list[str]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.rank, layer.alpha), []).append(layer.name)
    return [_peft_config(kind, rank, alpha, names, network) for (kind, rank, alpha), names in groups.items()]


def _peft_config(kind: str, rank: int, alpha: float, names: list[str], network: NetworkConfig) -> Any:
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    if kind in ("lora", "dora"):
        return LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=network.dropout, use_dora=kind == "dora", target_modules=names
        )
    if kind == "loha":
        return LoHaConfig(r=rank, alpha=alpha, use_effective_conv2d=False, target_modules=names)
    return LoKrConfig(
        r=rank,
        alpha=alpha,
        decompose_factor=network.lokr_factor,
        decompose_both=False,
        use_effective_conv2d=False,
        target_modules=names,
    )
