"""Safetensors files whose bytes follow from their content, laid out before the values are there.

A file is one piece of memory: its header, then the tensors in their places. Values are copied straight from the device to
where they lie in the file, and nothing is copied again to write it. Hashing and writing such memory leaves Python free to
run other threads, which the library's own `save` does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_HASH = "sshs_model_hash"
_NO_HASH = "0" * 64
_HASH_PLACE = f'"{_HASH}":"{_NO_HASH}"'.encode()  # quotes inside of texts are escaped: only the key itself reads so
_MOST_PINNED_BYTES = 4 << 30  # page-locked memory is scarce: bigger files are copied through the driver's own

# the library's order in a file: wider types first, so that every tensor is aligned
_TYPES: Mapping[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_TYPES)}


class HostBuffers:
    """Memory that snapshots are copied into again and again: one buffer for each name, one user at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, size_bytes: int, *, pinned: bool) -> Tensor:
        """The buffer of this name, (size_bytes,) uint8; what was in it may be overwritten."""
        pinned = pinned and size_bytes <= _MOST_PINNED_BYTES
        found = self._buffers.get(name)
        if found is None or found.numel() < size_bytes:
            found = self._buffers[name] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return found[:size_bytes]


class TensorFile:
    """A file in memory, with the values that tensors have when it is made.

    Values on a GPU are still on their way until the device is synchronised.

    Args:
        tensors: By the keys of the file, on any device.
        header: Texts for the header, written in the order of their names (the library's order differs at every call),
            together with `sshs_model_hash`: the sha256 of everything after the header, by which kohya's tools know a
            file. None: no texts and no hash, as the library writes it.
        name: Under which `buffers` knows its memory.
        buffers: Memory to use; None makes new memory.
        whole: Turns each tensor, in the order of the file, into one that holds all its values: where they lie in shares
            on several ranks, the others call `take_part`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        header: Mapping[str, str] | None = None,
        *,
        name: str = "",
        buffers: HostBuffers | None = None,
        whole: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        text = _header_text(tensors, header)
        self._begin = 8 + len(text)
        self._hash_at = 8 + text.index(_HASH_PLACE) + len(_HASH) + 4 if header is not None else None
        size_bytes = self._begin + sum(tensor.nbytes for tensor in tensors.values())
        pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
        buffers = buffers or HostBuffers()
        self._memory = buffers.take(name, size_bytes, pinned=pinned)
        view = self._view()
        view[:8] = len(text).to_bytes(8, "little")
        view[8 : self._begin] = text
        self.tensors: dict[str, Tensor] = {}
        at = self._begin
        for key, tensor in _in_order(tensors):
            place = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(whole(tensor), non_blocking=True)
            self.tensors[key] = place
            at += tensor.nbytes

    def finished(self) -> memoryview:
        """The bytes of the file; they stay what they are until its buffer is taken again."""
        view = self._view()
        if self._hash_at is not None:
            digest = hashlib.sha256(view[self._begin :]).hexdigest().encode()
            view[self._hash_at : self._hash_at + len(digest)] = digest
        return view

    def _view(self) -> memoryview:
        return memoryview(self._memory.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def take_part(tensors: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> None:
    """What other ranks do while one makes a file of tensors that lie in shares on all of them."""
    for _, tensor in _in_order(tensors):
        whole(tensor)


def with_header(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """A file with its header's texts and its hash; see `TensorFile`."""
    return bytes(TensorFile({key: tensor.cpu() for key, tensor in tensors.items()}, header).finished())


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: (_RANKS[item[1].dtype], item[0].encode()))


def _header_text(tensors: Mapping[str, Tensor], header: Mapping[str, str] | None) -> bytes:
    table: dict[str, Any] = {}
    if header is not None:
        table["__metadata__"] = dict(sorted({**header, _HASH: _NO_HASH}.items()))
    at = 0
    for key, tensor in _in_order(tensors):
        offsets = [at, at + tensor.nbytes]
        table[key] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
