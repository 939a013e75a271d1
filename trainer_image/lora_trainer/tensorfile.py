"""Safetensors files whose bytes follow from their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor


def with_header(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """A file with its header's texts in the order of their names: the library's order differs at every call.

    `sshs_model_hash` is added, the sha256 of everything after the header: kohya's tools know a file by it.
    """
    data = save(dict(tensors), metadata=dict(header))
    size_bytes = int.from_bytes(data[:8], "little")
    content = memoryview(data)[8 + size_bytes :]  # a whole denoiser has many gigabytes: it is copied once only
    table = json.loads(data[8 : 8 + size_bytes])
    facts = {**header, "sshs_model_hash": hashlib.sha256(content).hexdigest()}
    table["__metadata__"] = dict(sorted(facts.items()))
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return b"".join((len(text).to_bytes(8, "little"), text, content))
