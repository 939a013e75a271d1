"""The shapes of a base model's tensors: from the headers of its safetensors files, where a folder is at hand.

Only headers are read, a few hundred kilobytes of a model of many gigabytes; nothing here needs torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

DENOISERS = ("transformer", "transformer_2", "unet")
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
VAE = "vae"

_HEADER_LIMIT_BYTES = 100_000_000  # as the safetensors library
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_ITEM_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Shape:
    """The shape of one tensor.

    Attributes:
        sizes: Of its axes.
        item_bytes: Bytes of one number that keeps its format; None for floats, which are loaded in a format of choice.
    """

    sizes: tuple[int, ...]
    item_bytes: int | None = None

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return prod(self.sizes)


Component: TypeAlias = "Mapping[str, Shape]"
"""Tensors of one component of a pipeline, by their names in diffusers or transformers."""


@dataclass(frozen=True)
class ModelShapes:
    """What a base model consists of.

    Attributes:
        components: Of the pipeline, by name.
        source: Where this is known from, for people.
    """

    components: Mapping[str, Component]
    source: str

    @property
    def denoisers(self) -> dict[str, Component]:
        """The networks that adapters are added to."""
        return {name: self.components[name] for name in DENOISERS if name in self.components}

    @property
    def text_encoders(self) -> dict[str, Component]:
        """The networks that encode captions."""
        return {name: self.components[name] for name in TEXT_ENCODERS if name in self.components}

    @property
    def vae(self) -> Component:
        """The network between pixels and latents."""
        return self.components.get(VAE, {})


def read_folder(folder: Path) -> ModelShapes | None:
    """The shapes in the folder of a diffusers pipeline; None where it holds no denoiser that can be read.

    A denoiser in a single file has the names of the original model, so that layers can't be told from it: None as well.
    """
    components = {name: found for name in (*DENOISERS, *TEXT_ENCODERS, VAE) if (found := _component(folder / name))}
    if not any(name in components for name in DENOISERS):
        return None
    return ModelShapes(components, str(folder))


def _component(folder: Path) -> dict[str, Shape]:
    try:
        return {name: shape for file in _weight_files(folder) for name, shape in _header(file)}
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return {}


def _weight_files(folder: Path) -> list[Path]:
    """Those that the libraries load: the ones that an index names, or the one without a variant in its name."""
    for stem in ("diffusion_pytorch_model", "model"):
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        if (folder / f"{stem}.safetensors").is_file():
            return [folder / f"{stem}.safetensors"]
    return []


def _header(file: Path) -> Iterator[tuple[str, Shape]]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _HEADER_LIMIT_BYTES:
            raise ValueError(f"{file}: no safetensors header")
        header = json.loads(stream.read(size))
    for name, entry in header.items():
        if name != "__metadata__":
            kept = None if entry["dtype"] in _FLOATS else _ITEM_BYTES[entry["dtype"]]
            yield name, Shape(tuple(entry["shape"]), kept)
