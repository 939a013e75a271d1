"""A family of another package that fails where a test wants it: Z-Image, but for what `FAULT` says.

`FAULT` is `rank:place:call:what`: on that rank, when a place (load, encode, batch, forward) is reached for the n-th time,
`oom` raises the allocator's error, `error` one that nobody foresees, `data` that of unusable data, and `stall` waits for
ever.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from lora_trainer.errors import DataError
from lora_trainer.families.zimage import ZImage, ZImageModel

CALLS: dict[str, int] = {}


def reached(place: str) -> None:
    """Fails if it is time."""
    CALLS[place] = CALLS.get(place, 0) + 1
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        rank, where, call, what = fault.split(":")
        if (rank, where, int(call)) != (os.environ.get("RANK", "0"), place, CALLS[place]):
            continue
        if what == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 10 GiB.")
        if what == "error":
            raise KeyError("surprise")
        if what == "data":
            raise DataError("datasets/7.png: is not a picture")
        threading.Event().wait()


class FaultyModel(ZImageModel):
    """Says where it is."""

    def encode_pixels(self, pixels):
        """See `BaseModel.encode_pixels`."""
        reached("encode")
        return super().encode_pixels(pixels)

    def collate(self, conditions):
        """See `BaseModel.collate`."""
        reached("batch")
        return super().collate(conditions)

    def velocity(self, x_t, sigma, conditioning):
        """See `FlowModel.velocity`."""
        reached("forward")
        return super().velocity(x_t, sigma, conditioning)


class Faulty(ZImage):
    """Z-Image under another name."""

    arch = ("x-faulty",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> FaultyModel:
        """See `Family.load`."""
        reached("load")
        found = super().load(folder, dtype=dtype, device=device)
        return FaultyModel(found.pipe, folder, dtype=dtype, device=device)
