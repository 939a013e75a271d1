"""The layouts of adapter files: the same change of the weights under the names and conventions of other programs.

Every layout is built from fp32 factors and holds the same DeltaW. The scale alpha / rank is folded into the weights
wherever readers disagree about it; where a layout has its own place for alpha, that is used.

- diffusers: `transformer.<layer>.lora_A.weight` (or `unet.`, `text_encoder.text_model.`), `.lokr_w1`...; one file for each kind that diffusers reads (lora,
  dora, lokr). loha is written as the lora that it equals.
- Two experts: `adapter_high_noise.safetensors` and `adapter_low_noise.safetensors`, and so for every layout.
- peft: the same under `base_model.model.`, with `adapter_config.json`; one folder for each kind.
- comfyui: `diffusion_model.<original layer>.` and peft's factor names, no alpha.
- kohya: `lora_unet_<original_layer>.lora_down.weight`, `.lora_up.weight`, `.alpha` (fp32); loha and lokr as LyCORIS
  names them.

dora is written as DeltaW itself (`.diff`) for ComfyUI and kohya: programs disagree over which axis its norms are taken.
So are layers of several parts that no sum of factors expresses, unless the lora they equal is smaller.

References:
    ComfyUI: `comfy/lora.py`, `comfy/weight_adapter/`. sd-scripts: `networks/lora.py`. LyCORIS: `docs/`. diffusers 0.42:
    `loaders/lora_conversion_utils.py`. Checked in tests/trainer/test_formats.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_trainer.families.base import BaseModel
from lora_trainer.families.original import Original, grouped
from lora_trainer.families.parts import Part, by_part, part_of
from lora_trainer.networks import Adapter, Factors
from lora_trainer.networks.factors import LORA_A, LORA_B, stacked
from lora_trainer.networks.portable import file_config, peft_config_file, rank_and_alpha

KINDS = ("lora", "dora", "lokr")  # that diffusers reads, in the order of files
ALPHA = "alpha"  # stays fp32 in every file: 33.3 is no bf16 number


@dataclass
class AdapterFile:
    """A file to be written.

    Attributes:
        name: Relative to the final folder.
        tensors: fp32, by the keys of the file.
        header: Text for the file's header.
        texts: Files that go with it, by name.
    """

    name: str
    tensors: dict[str, Tensor]
    header: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def diffusers_files(model: BaseModel, adapter: Adapter) -> list[AdapterFile]:
    """The files that diffusers loads: `adapter.safetensors`, one more for each further kind; for two experts, of each."""
    groups: dict[tuple[str, str], dict[str, Factors]] = {}
    for module in adapter.modules:
        factors = adapter.factors(module).baked()
        factors = factors.as_lora() if factors.kind == "loha" else factors
        groups.setdefault((part_of(adapter.parts, module).ending, factors.kind), {})[module] = factors
    files: list[AdapterFile] = []
    begun = set()
    for ending, kind in sorted(groups, key=lambda key: (list(model.export_parts).index(key[0]), KINDS.index(key[1]))):
        group = groups[ending, kind]
        header = {
            "format": "pt",
            "lora_adapter_metadata": adapter.file_metadata(kind, {n: rank_and_alpha(f) for n, f in group.items()}),
            "denoiser_class": type(getattr(model.pipe, model.export_parts[ending])).__name__,
        }
        name = f"adapter{ending}.{kind}.safetensors" if ending in begun else f"adapter{ending}.safetensors"
        begun.add(ending)
        tensors: dict[str, Tensor] = {}
        for part, names in by_part(adapter.parts, group):
            tensors |= _keyed({part.bare(n): group[n] for n in names}, part.file_prefix)
        files.append(AdapterFile(name, tensors, header))
    return files


def peft_files(adapter: Adapter) -> list[AdapterFile]:
    """`peft/adapter_model.safetensors` with its configuration, and one more folder for each further kind and expert."""
    files: list[AdapterFile] = []
    for part, names in by_part(adapter.parts, adapter.modules):
        begun = False
        for kind in adapter.kinds:
            group = {part.inner(n): adapter.factors(n).baked() for n in names if adapter.layers[n].kind == kind}
            if not group:
                continue
            ranks = {n: rank_and_alpha(f) for n, f in group.items()}
            config = peft_config_file(kind, file_config(kind, ranks, factor=adapter.network.lokr_factor))
            folder = f"peft{part.ending}-{kind}" if begun else f"peft{part.ending}"
            begun = True
            texts = {f"{folder}/adapter_config.json": json.dumps(config, indent=1, sort_keys=True)}
            tensors = _keyed(group, "base_model.model.")
            files.append(AdapterFile(f"{folder}/adapter_model.safetensors", tensors, {"format": "pt"}, texts))
    return files


def comfyui_files(model: BaseModel, adapter: Adapter) -> list[AdapterFile]:
    """`adapter.comfyui.safetensors`; for two experts one of each."""
    files = []
    for part, names in by_part(adapter.parts, adapter.modules):
        tensors: dict[str, Tensor] = {}
        for name, factors in _original_layers(part, names, adapter, model.comfyui_layer):
            tensors |= {f"diffusion_model.{name}.{key}": tensor for key, tensor in factors.baked().tensors.items()}
        files.append(AdapterFile(f"adapter{part.ending}.comfyui.safetensors", tensors, {"format": "pt"}))
    return files


def kohya_files(model: BaseModel, adapter: Adapter) -> list[AdapterFile]:
    """`adapter.kohya.safetensors`; for two experts one of each."""
    files = []
    for part, names in by_part(adapter.parts, adapter.modules):
        tensors: dict[str, Tensor] = {}
        for name, found in _original_layers(part, names, adapter, model.original_layer):
            factors = found if found.kind == "lora" else found.baked()
            layer = "lora_unet_" + name.replace(".", "_")
            for key, tensor in factors.tensors.items():
                tensors[f"{layer}.{_KOHYA_NAMES.get(key, key)}"] = tensor
            if factors.rank is not None:
                tensors[f"{layer}.{ALPHA}"] = torch.tensor(factors.scale * factors.rank, dtype=torch.float32)
        files.append(AdapterFile(f"adapter{part.ending}.kohya.safetensors", tensors, {"format": "pt"}))
    return files


_KOHYA_NAMES = {LORA_A: "lora_down.weight", LORA_B: "lora_up.weight"}


def files_of(model: BaseModel, adapter: Adapter, form: str) -> list[AdapterFile]:
    """The files of one entry of `save.formats`."""
    if form == "diffusers":
        return diffusers_files(model, adapter)
    if form == "peft":
        return peft_files(adapter)
    return comfyui_files(model, adapter) if form == "comfyui" else kohya_files(model, adapter)


def _keyed(group: dict[str, Factors], prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}{name}.{key}": tensor for name, factors in group.items() for key, tensor in factors.tensors.items()
    }


def _original_layers(
    part: Part, names: list[str], adapter: Adapter, original: Callable[[str], Original]
) -> Iterator[tuple[str, Factors]]:
    """The original layers of a part that are changed, and how, in a form that ComfyUI and kohya's tools read."""
    modules = part.module.named_modules()
    weights = {n.removesuffix(".base_layer"): m.weight for n, m in modules if _is_layer(n, m)}
    originals = {name: original(name) for name in weights}
    changed = {part.inner(name): name for name in names}
    for original_name, layers in grouped(changed, originals).items():
        pieces = []
        for layer in layers:
            if layer in changed:
                factors = adapter.factors(changed[layer])
                pieces.append(factors.as_dense(weights[layer]) if factors.kind == "dora" else factors)
            else:
                pieces.append(_nothing(tuple(weights[layer].shape)))
        yield original_name, pieces[0] if len(pieces) == 1 else _joined(pieces)


def _is_layer(name: str, module: torch.nn.Module) -> bool:
    kinds = torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d
    return isinstance(module, kinds) and ".lora_" not in name


def _nothing(shape: tuple[int, ...]) -> Factors:
    """The lora of rank 0: no change."""
    ones = (1,) * (len(shape) - 2)
    a, b = torch.zeros(0, *shape[1:]), torch.zeros(shape[0], 0, *ones)
    return Factors("lora", {LORA_A: a, LORA_B: b}, 1.0, shape)


def _joined(parts: list[Factors]) -> Factors:
    """One change for outputs one below the other: a lora, or DeltaW itself where that is smaller."""
    as_they_are = stacked(parts)
    if as_they_are is not None:
        return as_they_are
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    m, n = shape[0], math.prod(shape[1:])
    if all(part.kind != "dense" for part in parts):
        joined = stacked([part if part.kind == "lora" else part.as_lora() for part in parts])
        if joined is not None and (joined.rank or 0) * (m + n) < m * n:
            return joined
    return Factors("dense", {"diff": torch.cat([part.delta() for part in parts])}, 1.0, shape)
