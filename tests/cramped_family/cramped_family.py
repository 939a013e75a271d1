"""`model.arch: x-cramped`: Z-Image on a device that has no room for what the environment says.

CRAMPED_MOST=N: more than N samples at once don't fit. CRAMPED_RECOMPUTES=1: nothing fits that does not recompute its
activations. CRAMPED_LOADING=1: not even the model fits.
"""

from __future__ import annotations

import os

import torch

from lora_trainer.families.zimage import ZImage, ZImageModel


class CrampedModel(ZImageModel):
    """A Z-Image that runs out of memory."""

    def velocity(self, x_t, sigma, conditioning):
        """As in the base class, if it fits."""
        most = int(os.environ.get("CRAMPED_MOST", "1024"))
        recomputes = getattr(self.denoiser, "gradient_checkpointing", False)
        if len(x_t) > most or (os.environ.get("CRAMPED_RECOMPUTES") and not recomputes):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x_t)} GiB. GPU 0 is full.")
        return super().velocity(x_t, sigma, conditioning)


class Cramped(ZImage):
    """The family."""

    arch = ("x-cramped",)

    def load(self, folder, *, dtype, device):
        """As in the base class, if it fits."""
        if os.environ.get("CRAMPED_LOADING"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB.")
        model = super().load(folder, dtype=dtype, device=device)
        model.__class__ = CrampedModel
        return model
