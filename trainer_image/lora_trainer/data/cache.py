"""Encoded pictures and captions on disk, by the content they were made from.

A key covers everything that decides the bytes: the picture's own bytes, the model's weights, the bucket, the version of
the pixel pipeline. Changing any of them gives another key, so nothing here is ever stale; it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer.data.clips import CLIP_NORMALISATION
from lora_trainer.data.images import NORMALISATION
from lora_trainer.data.masks import MASK_NORMALISATION
from lora_trainer.data.samples import Sample
from lora_trainer.errors import TransientError

_CHECKSUM = "crc32"


def latents_key(sample: Sample, identity: str) -> str:
    """Key of the latents of a picture or clip; `identity` names the VAE and the family's formulas."""
    if sample.frames:
        frames = " ".join(map(str, sample.frames))
        return _key("latents", identity, sample.sha256, str(sample.bucket), frames, CLIP_NORMALISATION)
    return _key("latents", identity, sample.sha256, str(sample.bucket), NORMALISATION)


def mask_key(sample: Sample, identity: str) -> str:
    """Key of the mask of a sample at the size of its latents; `identity` as for these."""
    return _key("mask", identity, str(sample.mask), str(sample.bucket), str(bool(sample.frames)), MASK_NORMALISATION)


def text_key(caption: str, identity: str) -> str:
    """Key of a caption's condition; `identity` names text encoder, tokenizer and lengths."""
    return _key("text", identity, caption)


def _key(kind: str, *parts: str) -> str:
    return f"{kind}/{hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()}"


class TensorCache:
    """Named tensors by key, one safetensors file each, with a checksum in the header."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def holds(self, key: str) -> bool:
        """Whether there is a whole file for the key; its content is checked when it is loaded."""
        try:
            with safe_open(self._path(key), framework="pt") as file:  # compares the header with the file's length
                return _CHECKSUM in (file.metadata() or {})
        except (OSError, SafetensorError):
            return False

    def load(self, key: str) -> dict[str, Tensor]:
        """The tensors.

        Raises:
            TransientError: When the entry is gone or damaged; it is removed, and the next start makes it again.
        """
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                expected = (file.metadata() or {}).get(_CHECKSUM)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise TransientError(
                f"{path}: the cache entry can't be read ({error}); it is made again at the next start"
            ) from error
        if checksum(tensors) != expected:
            path.unlink(missing_ok=True)
            raise TransientError(f"{path}: the cache entry is damaged; it is made again at the next start")
        return tensors

    def store(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Writes an entry, whole or not at all."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        os.close(handle)
        try:
            save_file(tensors, name, metadata={_CHECKSUM: checksum(tensors)})
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        kind, _, digest = key.partition("/")
        return self._folder / kind / digest[:2] / f"{digest}.safetensors"


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 over the bytes of named tensors, in the order of their names."""
    value = 0
    for name in sorted(tensors):
        flat = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(flat.numpy().data, value)
    return f"{value:08x}"
