"""The model families, and what sets some of them apart."""

from __future__ import annotations

from enum import StrEnum


class Arch(StrEnum):
    """A model family, `model.arch`."""

    FLUX2_KLEIN_4B = "flux2_klein_4b"
    FLUX2_KLEIN_9B = "flux2_klein_9b"
    FLUX2_DEV = "flux2_dev"
    ZIMAGE = "zimage"
    ZIMAGE_TURBO = "zimage:turbo"
    QWEN_IMAGE = "qwen_image"
    WAN21 = "wan21"
    WAN22 = "wan22"


VIDEO_ARCHS = frozenset({Arch.WAN21, Arch.WAN22})
"""Families that take clips."""

FRAME_STEP = 4  # frames that a video VAE folds into one latent frame, after the first: clips have 4k + 1 frames
