"""What a configuration trains, in numbers: which layers of a model, and how many parameters an adapter has for each.

Shapes: m outputs and n inputs of a layer, k positions of a convolution's kernel, r rank.

References:
    `lora_trainer.networks.factors` has the formulas. Checked against the real adapters, of every type and family, in
    tests/trainer/test_memory_estimate.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from lora_api.archs import UNET_ARCHS, Arch
from lora_api.config import TrainerConfig
from lora_api.memory.shapes import Component, ModelShapes
from lora_api.network import ModuleRule, NetworkConfig

WEIGHT = ".weight"
_CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "proj_in", "proj_out")
_QWEN_UNREAD = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.")
_LISTED = re.compile(r"\w+\.\d+\.")
_TEXT_LAYER = re.compile(r"layers\.(\d+)\.")
_TEXT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True)
class Trained:
    """Parameters that are trained.

    Attributes:
        parameters: How many numbers.
        tensors: In how many tensors.
        layers: Names of the layers, with their component in front.
    """

    parameters: int
    tensors: int
    layers: frozenset[str]


def trained_parameters(config: TrainerConfig, shapes: ModelShapes) -> Trained:
    """What a run trains. Patterns that match nothing count as nothing here: the trainer refuses them."""
    if config.network.type == "full":
        return _whole(config, shapes)
    parameters, tensors, names = 0, 0, set()
    for full, sizes in _adapted(config, shapes):
        rule = rule_for(full, config.network.modules)
        if rule is not None and rule.freeze:
            continue
        found = adapter_shapes(sizes, config.network, rule)
        parameters += sum(prod(size) for size in found)
        tensors += len(found)
        names.add(full)
    return Trained(parameters, tensors, frozenset(names))


def _adapted(config: TrainerConfig, shapes: ModelShapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Layers that get an adapter unless a rule freezes them, with the sizes of their weights."""
    candidates = []
    if config.train.train_unet:
        for component, tensors in shapes.denoisers.items():
            candidates += [
                (f"{component}.{name}", sizes) for name, sizes in denoiser_targets(config.model.arch, tensors)
            ]
    if config.train.train_text_encoder:
        for component, tensors in trainable_text_encoders(config.model.arch, shapes).items():
            candidates += [
                (_with_lead(component, n), s) for n, s in _text_targets(config.model.arch, component, tensors)
            ]
    for full, sizes in candidates:
        if len(sizes) > 2 and config.network.conv is None:
            continue
        if passes_filters(full, config.network):
            yield full, sizes


def trainable_text_encoders(arch: str, shapes: ModelShapes) -> dict[str, Component]:
    """The text encoders that `train.train_text_encoder` trains: the first, and both of SDXL."""
    return {n: t for n, t in shapes.text_encoders.items() if n == "text_encoder" or arch == Arch.SDXL}


def _text_targets(arch: str, component: str, tensors: Component) -> list[tuple[str, tuple[int, ...]]]:
    found = [(name, sizes) for name, sizes in layers_of(tensors) if name.rpartition(".")[2] in _TEXT_PROJECTIONS]
    if arch != Arch.SDXL or component != "text_encoder":
        return found
    last = max(int(match[1]) for name, _ in found if (match := _TEXT_LAYER.search(name)))
    return [(name, sizes) for name, sizes in found if f"layers.{last}." not in name]  # nobody reads what it gives


def _with_lead(component: str, name: str) -> str:
    return f"{component}.{name}" if name.startswith("text_model.") else f"{component}.text_model.{name}"


def layers_of(tensors: Component) -> list[tuple[str, tuple[int, ...]]]:
    """Linear and convolution layers of a component, by the shapes of their weights."""
    return [(n.removesuffix(WEIGHT), s.sizes) for n, s in tensors.items() if n.endswith(WEIGHT) and len(s.sizes) > 1]


def denoiser_targets(arch: str, tensors: Component) -> list[tuple[str, tuple[int, ...]]]:
    """The layers of a denoiser that adapters change unless told otherwise, as the trainer's families choose them.

    Args:
        arch: `model.arch`. Of families that other packages add, all linear layers in lists of blocks are taken.
        tensors: Of the denoiser.
    """
    layers = layers_of(tensors)
    if arch in UNET_ARCHS:
        return [
            (name, sizes)
            for name, sizes in layers
            if (len(sizes) == 2 and ".attentions." in name) or (len(sizes) > 2 and name.endswith(_CONVOLUTIONS))
        ]
    linear = [(name, sizes) for name, sizes in layers if len(sizes) == 2]
    if arch in (Arch.ZIMAGE, Arch.ZIMAGE_TURBO):
        return [(name, sizes) for name, sizes in linear if name.startswith("layers.")]
    if arch == Arch.QWEN_IMAGE:
        return [(name, sizes) for name, sizes in linear if _qwen_target(name, _list_length(linear))]
    return [(name, sizes) for name, sizes in linear if _LISTED.match(name)]


def layers_in_blocks(arch: str, tensors: Component) -> list[tuple[str, tuple[int, ...]]]:
    """The linear layers of a denoiser's repeated blocks: those that are quantised and kept in CPU memory on request.

    Args:
        arch: `model.arch`. The repeated blocks of UNets are the transformer blocks inside their attentions.
        tensors: Of the denoiser.
    """
    linear = [(name, sizes) for name, sizes in layers_of(tensors) if len(sizes) == 2]
    if arch in UNET_ARCHS:
        return [(name, sizes) for name, sizes in linear if ".transformer_blocks." in name]
    return [(name, sizes) for name, sizes in linear if _LISTED.match(name)]


def _qwen_target(name: str, count: int) -> bool:
    last = f"transformer_blocks.{count - 1}."
    unread = tuple(last + part for part in _QWEN_UNREAD)
    return name.startswith("transformer_blocks.") and "_mod." not in name and not name.startswith(unread)


def _list_length(layers: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    return len({name.split(".")[1] for name, _ in layers if name.startswith("transformer_blocks.")})


def passes_filters(full: str, network: NetworkConfig) -> bool:
    """Whether both lists of `network` let a layer through, by its name with the component in front."""
    only, ignored = network.only_if_contains, network.ignore_if_contains
    return (not only or any(entry in full for entry in only)) and not any(entry in full for entry in ignored)


def rule_for(full: str, rules: tuple[ModuleRule, ...]) -> ModuleRule | None:
    """The first rule whose pattern matches a layer, with or without the component in front."""
    bare = full.partition(".")[2]
    return next((rule for rule in rules if fnmatchcase(full, rule.match) or fnmatchcase(bare, rule.match)), None)


def adapter_shapes(
    sizes: tuple[int, ...], network: NetworkConfig, rule: ModuleRule | None = None
) -> list[tuple[int, ...]]:
    """The shapes of the adapter's tensors for one layer.

    Args:
        sizes: Of the layer's weight: (m, n), or (m, n, height, width) of a convolution.
        network: Type and ranks.
        rule: The rule that speaks of this layer.
    """
    m, n, k = sizes[0], sizes[1], prod(sizes[2:])
    kind = (rule and rule.type) or network.type
    rank = (network.conv or 0) if k > 1 or len(sizes) > 2 else (rule and rule.linear) or network.linear
    if kind in ("lora", "dora"):
        return [(rank, n * k), (m, rank), *([(m,)] if kind == "dora" else [])]
    if kind == "loha":
        return [(m, rank), (rank, n * k)] * 2
    (m1, m2), (n1, n2) = factors_of(m, network.lokr_factor), factors_of(n, network.lokr_factor)
    whole = network.lokr_full_rank or rank >= max(m2, n2) / 2
    return [(m1, n1), *([(m2, n2 * k)] if whole else [(m2, rank), (rank, n2 * k)])]


def factors_of(size: int, factor: int) -> tuple[int, int]:
    """Two numbers whose product is `size`, the smaller first: `factor` and the rest, or the most even split.

    References:
        LyCORIS, `functional/general.py`, `factorization`.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = size if factor == -1 else factor
    small, large = 1, size
    while small < large:
        wider = next(number for number in range(small + 1, size + 1) if size % number == 0)
        if wider + size // wider > small + large or wider > limit:
            break
        small, large = wider, size // wider
    return min(small, large), max(small, large)


def _whole(config: TrainerConfig, shapes: ModelShapes) -> Trained:
    """Full fine-tuning: the weights of the denoiser themselves."""
    parameters, tensors, names = 0, 0, set()
    for component, found in shapes.denoisers.items():
        for name, shape in found.items():
            head, _, last = name.rpartition(".")
            full = f"{component}.{head if last in ('weight', 'bias') else name}"
            rule = rule_for(full, config.network.modules)
            if not passes_filters(full, config.network) or (rule is not None and rule.freeze):
                continue
            parameters += shape.count
            tensors += 1
            names.add(full)
    return Trained(parameters, tensors, frozenset(names))
