"""The model families, and what sets some of them apart."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lora_api.patterns import CUSTOM_ARCH


class Arch(StrEnum):
    """The built-in model families, values of `model.arch`."""

    FLUX1 = "flux1"
    FLUX2_KLEIN_4B = "flux2_klein_4b"
    FLUX2_KLEIN_9B = "flux2_klein_9b"
    FLUX2_DEV = "flux2_dev"
    SD15 = "sd15"
    SDXL = "sdxl"
    ZIMAGE = "zimage"
    ZIMAGE_TURBO = "zimage:turbo"
    QWEN_IMAGE = "qwen_image"
    WAN21 = "wan21"
    WAN22 = "wan22"


VIDEO_ARCHS = frozenset({Arch.WAN21, Arch.WAN22})
"""Families that take clips."""

FRAME_STEP = 4  # frames that a video VAE folds into one latent frame, after the first: clips have 4k + 1 frames

UNET_ARCHS = frozenset({Arch.SD15, Arch.SDXL})
"""Families whose denoiser is a UNet. Which of its original layers is which is not written down here."""

TEXT_ENCODER_ARCHS: tuple[Arch, ...] = (Arch.FLUX1, Arch.SD15, Arch.SDXL)
"""Built-in families whose diffusers loader takes text-encoder layers from an adapter file."""

DYNAMIC_SHIFT_ARCHS = frozenset({Arch.FLUX1, Arch.FLUX2_KLEIN_4B, Arch.FLUX2_KLEIN_9B, Arch.FLUX2_DEV, Arch.QWEN_IMAGE})
"""Families whose pipeline shifts its noise levels by picture size."""

CUSTOM_PREFIX = "x-"
"""Begins the `model.arch` of families that other packages add; only the trainer image knows which there are."""


def trains_text_encoder(arch: str) -> bool:
    """Whether `train.train_text_encoder` may be true; families of other packages answer for themselves, at the start."""
    return arch in TEXT_ENCODER_ARCHS or arch.startswith(CUSTOM_PREFIX)


def knows_original_layers(arch: str) -> bool:
    """Whether adapters can be written under the names of the model as it was first published."""
    return arch not in UNET_ARCHS and not arch.startswith(CUSTOM_PREFIX)


def _known_arch(value: str) -> str:
    if value in tuple(Arch) or re.fullmatch(CUSTOM_ARCH, value):
        return value
    choices = ", ".join([*Arch, f"{CUSTOM_PREFIX}... of a family that you added"])
    raise PydanticCustomError("enum", "Input should be {expected}", {"expected": choices})


ArchName = Annotated[str, Field(min_length=1, max_length=63), AfterValidator(_known_arch)]
