"""Adapter files of any tool, read as the change they make to each layer of a denoiser.

Many layouts that another program takes without an error have no effect there. Here every key has to find its place: a
layer that the denoiser has, a factor that some formula has, a shape that fits. Anything left over is an error.

Conventions of the scale: a tensor `.alpha` beside factors of rank r means alpha / r, and nothing for Kronecker factors
that are both whole (LyCORIS); else the configuration in the header or beside the file decides (peft: alpha / r always);
else the scale is 1.

References:
    diffusers 0.42: `loaders/lora_conversion_utils.py`. LyCORIS 4.1: `modules/lokr.py`, `modules/loha.py`. peft 0.21:
    `utils/save_and_load.py`. Checked in tests/trainer/test_init_from.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lora_trainer.families.parts import TEXT_ENCODER, Part, by_part, part_of
from lora_trainer.networks.factors import LORA_A, LORA_B, MAGNITUDE, Factors, Kind

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

ALPHA = "alpha"
PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.", "model.", "unet.")
FLAT_PREFIXES = ("lora_unet_", "lycoris_", "lora_transformer_")

_FACTORS = {
    r"lora(?:_A|_down|\.down)(?:\.default)?\.weight": LORA_A,
    r"lora(?:_B|_up|\.up)(?:\.default)?\.weight": LORA_B,
    rf"(?:{MAGNITUDE}(?:\.default)?(?:\.weight)?|dora_scale)": MAGNITUDE,
    r"(?P<same>(?:lokr|hada)_w[12](?:_[ab])?|diff|alpha)": "",
}
_PATTERN = re.compile(rf"^(?P<layer>.+?)\.(?P<factor>{'|'.join(f'(?:{each})' for each in _FACTORS)})$")
SHOWN = 3


def read_factors(file: Path, model: BaseModel, parts: Sequence[Part]) -> dict[str, Factors]:
    """The change of each layer that an adapter file makes, by full dotted names of the denoiser's layers.

    Args:
        file: A safetensors file.
        model: The base model it is for.
        parts: The components that may be changed.

    Raises:
        ValueError: The file can't be read, holds no adapter, or has keys, layers or shapes that do not fit.
    """
    tensors, config = _read(file)
    layers: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        found = _PATTERN.match(key)
        if found is None:
            unknown.append(key)
            continue
        layers.setdefault(found["layer"], {})[_factor(found["factor"])] = tensor
    if unknown:
        raise ValueError(
            f"{file}: {len(unknown)} keys belong to no known kind of adapter: {', '.join(unknown[:SHOWN])}"
        )
    if not layers:
        raise ValueError(f"{file}: holds no adapter")
    places = _Places(model, parts)
    result: dict[str, Factors] = {}
    lost = [layer for layer in layers if places.of(layer) is None]
    if lost:
        raise ValueError(
            f"{file}: {len(lost)} of {len(layers)} layers are not in {type(model.denoiser).__name__}: "
            f"{', '.join(sorted(lost)[:SHOWN])}"
        )
    for layer, held in layers.items():
        names = places.of(layer)
        assert names is not None
        scale = _scale(held, _config_of(config, names[0]), part_of(parts, names[0]).bare(names[0]))
        for name, factors in _split(held, scale, [(n, places.shapes[n]) for n in names], f"{file}: {layer}"):
            if name in result:
                raise ValueError(f"{file}: changes the layer {name} twice")
            result[name] = factors
    return result


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors in fp32, and peft's configuration if there is one."""
    try:
        with safe_open(str(file), framework="pt") as reader:
            tensors = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 not a mapping
            header = reader.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: can't be read as a safetensors file: {error}") from error
    tensors = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    beside = file.with_name("adapter_config.json")
    if "lora_adapter_metadata" in header:
        found = json.loads(header["lora_adapter_metadata"])
        return tensors, found
    if any(key.startswith("base_model.model.") for key in tensors) and beside.is_file():
        return tensors, json.loads(beside.read_text(encoding="utf-8"))
    return tensors, {}


def _factor(name: str) -> str:
    for pattern, known in _FACTORS.items():
        if re.fullmatch(pattern, name):
            return known or name
    raise AssertionError(name)


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The layers of a component, with adapters or without, and the shapes of their weights."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    for name, layer in module.named_modules():
        if isinstance(layer, kinds) and ".lora_" not in name:
            yield name.removesuffix(".base_layer"), tuple(layer.weight.shape)


class _Places:
    """Finds the layers that a name in a file means."""

    def __init__(self, model: BaseModel, parts: Sequence[Part]) -> None:
        assert len(model.export_parts) == 1, "the types refuse this for two experts"
        self.shapes = {f"{part.prefix}{name}": shape for part in parts for name, shape in _shapes(part.module)}
        named: dict[str, list[str]] = {}
        for part, layers in by_part(parts, self.shapes):
            named |= {part.full(name): [name] for name in layers} | {name: [name] for name in layers}
        of_denoiser = [name for name in self.shapes if not part_of(parts, name).encodes_text]
        for original in (model.original_layer, model.comfyui_layer):
            parts_of: dict[str, list[tuple[int, str]]] = {}
            for name in of_denoiser:
                place = original(name)
                parts_of.setdefault(place.name, []).append((place.part, name))
            for place_name, found in parts_of.items():
                named.setdefault(place_name, [name for _, name in sorted(found)])
        self._named = named
        self._flat = {name.replace(".", "_"): layers for name, layers in named.items()}

    def of(self, name: str) -> list[str] | None:
        """The layers, in the order of their outputs; None when the denoiser has none of that name."""
        for prefix in FLAT_PREFIXES:
            if name.startswith(prefix):
                return self._flat.get(name.removeprefix(prefix))
        while name not in self._named:
            prefix = next((each for each in PREFIXES if name.startswith(each)), "")
            if not prefix:
                return None
            name = name.removeprefix(prefix)
        return self._named[name]


def _config_of(config: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """What a file's configuration says about the component of a layer: keys begin with it in diffusers' headers."""
    owner = layer.partition(".")[0]
    owners = (f"{owner}.",) if owner.startswith(TEXT_ENCODER) else ("transformer.", "unet.")
    begun = {key: next((each for each in owners if key.startswith(each)), "") for key in config}
    found = {key.removeprefix(begun[key]): value for key, value in config.items() if begun[key]} or dict(config)
    return found if "r" in found else {}


def _scale(held: Mapping[str, Tensor], config: Mapping[str, Any], layer: str) -> float:
    kronecker_of_whole = "lokr_w1" in held and "lokr_w2" in held
    if ALPHA in held:
        rank = _rank(held)
        return 1.0 if kronecker_of_whole or rank is None else float(held[ALPHA]) / rank
    if "diff" in held or not config:
        return 1.0
    rank = _from_patterns(config.get("rank_pattern", {}), layer, config["r"])
    alpha = _from_patterns(config.get("alpha_pattern", {}), layer, config.get("lora_alpha", config.get("alpha", rank)))
    return float(alpha) / float(rank)


def _from_patterns(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The rule of peft: the first pattern that matches the end of a layer's name."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer)), default)


def _rank(held: Mapping[str, Tensor]) -> int | None:
    return Factors("lora", held, 1.0, ()).rank


def _split(
    held: Mapping[str, Tensor], scale: float, parts: list[tuple[str, tuple[int, ...]]], where: str
) -> list[tuple[str, Factors]]:
    """The change of a layer, given to the layers it was split into."""
    tensors = {name: tensor for name, tensor in held.items() if name != ALPHA}
    sizes = [shape[0] for _, shape in parts]
    whole = Factors(_kind(tensors, where), tensors, scale, (sum(sizes), *parts[0][1][1:]))
    if MAGNITUDE in tensors:
        tensors[MAGNITUDE] = _of_outputs(tensors[MAGNITUDE], whole.shape[0], where)
    _check(whole, where)
    if len(parts) == 1:
        return [(parts[0][0], whole)]
    if whole.kind in ("lora", "dora"):
        pieces = {key: torch.split(tensors[key], sizes) for key in (LORA_B, MAGNITUDE) if key in tensors}
        return [
            (name, replace(whole, tensors=tensors | {key: piece[n] for key, piece in pieces.items()}, shape=shape))
            for n, (name, shape) in enumerate(parts)
        ]
    rows = torch.split(whole.delta(), sizes)
    return [(name, Factors("dense", {"diff": row}, 1.0, shape)) for (name, shape), row in zip(parts, rows, strict=True)]


def _of_outputs(magnitude: Tensor, outputs: int, where: str) -> Tensor:
    """Magnitudes (m,), if that is what they are: some tools take norms over outputs instead, one for each input."""
    if magnitude.numel() != outputs or (magnitude.ndim == 2 and magnitude.shape[0] == 1 != outputs):
        raise ValueError(
            f"{where}: its magnitudes are those of inputs, not of outputs; that form of dora can't be read"
        )
    return magnitude.reshape(-1)


def _kind(tensors: Mapping[str, Tensor], where: str) -> Kind:
    names = set(tensors)
    forms: dict[Kind, list[set[str]]] = {
        "lora": [{LORA_A, LORA_B}],
        "dora": [{LORA_A, LORA_B, MAGNITUDE}],
        "loha": [{"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}],
        "lokr": [
            {*one, *two}
            for one in (["lokr_w1"], ["lokr_w1_a", "lokr_w1_b"])
            for two in (["lokr_w2"], ["lokr_w2_a", "lokr_w2_b"])
        ],
        "dense": [{"diff"}],
    }
    for kind, sets in forms.items():
        if names in sets:
            return kind
    raise ValueError(f"{where}: its factors {', '.join(sorted(names))} are no complete set of any kind of adapter")


def _check(factors: Factors, where: str) -> None:
    """Refuses factors that are not finite or do not multiply to the layer's shape."""
    broken = [name for name, tensor in factors.tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"{where}: {', '.join(broken)} is not finite")
    wanted = (factors.shape[0], math.prod(factors.shape[1:]))
    try:
        found = tuple(factors.product().shape)
    except RuntimeError as error:
        raise ValueError(f"{where}: its factors do not fit each other: {error}") from error
    if found != wanted:
        raise ValueError(f"{where}: its factors multiply to {found}, but the layer has {wanted}")
