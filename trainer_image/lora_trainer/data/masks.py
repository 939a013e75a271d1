"""Masks: where a picture counts in the loss, and how much.

A mask is a grey picture, white where the picture counts and black where it doesn't; or the picture's own alpha channel.
It is turned, resized and cut like its picture, then averaged over the area of each latent pixel. `losses.loss_of` divides by
the sum of the mask, so that its size does not weigh the sample.

References:
    The keys of datasets are ai-toolkit's; there a batch is divided by its mean mask, here each sample by its own, so that
    four batches of one give what one batch of four gives. Checked in tests/trainer/test_masks.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lora_api.datasets import DatasetConfig
from lora_trainer.data.buckets import Size, fit
from lora_trainer.data.scan import PICTURE_ENDINGS, Picture
from lora_trainer.errors import DataError

log = logging.getLogger(__name__)

MASK_NORMALISATION = "exif,grey-on-black,bilinear-cover,centre,area/1"
"""Names what this module does to masks; part of their cache keys. Change it when the values change."""

_SAME_ASPECT = 0.02  # largest difference of log aspect ratios: rounding of small masks, not another picture

Prints = Callable[[Path], tuple[str, Size]]
"""Content hash and size of a picture."""


@dataclass(frozen=True)
class Mask:
    """Where the mask of a sample comes from, and how its grey is read."""

    path: Path
    sha256: str  # of the file's bytes
    alpha: bool  # its alpha channel counts, not its brightness
    inverted: bool
    least: float  # black stands for this, in [0, 1)

    def __str__(self) -> str:
        return f"{self.sha256} {'alpha' if self.alpha else 'grey'}{' inverted' if self.inverted else ''} {self.least!r}"


def mask_of(picture: Picture, config: DatasetConfig, folders: tuple[Path, Path | None], prints: Prints) -> Mask | None:
    """The mask of a picture or clip; None where its dataset has none.

    Args:
        picture: What is trained.
        config: Of its dataset.
        folders: Local folders of the pictures and of the masks.
        prints: Content hash and upright size of pictures.

    Raises:
        DataError: It is missing, or has another aspect ratio than the picture.
    """
    if config.alpha_mask and picture.is_clip:
        raise DataError(f"{picture.path}: alpha_mask: true, but clips have no alpha channel; use mask_path")
    if config.alpha_mask:
        return Mask(
            picture.path, prints(picture.path)[0], alpha=True, inverted=config.invert_mask, least=config.mask_min_value
        )
    pictures, masks = folders
    if masks is None:
        return None
    path = _found(picture.path, pictures, masks)
    sha256, size = prints(path)
    _, of_picture = prints(picture.path)
    if abs(math.log(size.width / size.height * of_picture.height / of_picture.width)) > _SAME_ASPECT:
        raise DataError(
            f"{path}: the mask has {size} pixels, its picture {picture.path} {of_picture}; expected the same size, or the "
            "same aspect ratio"
        )
    return Mask(path, sha256, alpha=False, inverted=config.invert_mask, least=config.mask_min_value)


def _found(picture: Path, pictures: Path, masks: Path) -> Path:
    """The mask with the picture's name: at the same place below its folder, else right in it."""
    relative = picture.relative_to(pictures)
    for stem in dict.fromkeys((masks / relative, masks / relative.name)):
        for ending in sorted(PICTURE_ENDINGS):
            path = stem.with_suffix(ending)
            if path.is_file():
                return path
    raise DataError(
        f"{picture}: there is no mask {masks / relative.with_suffix('.png')}; every picture of a dataset with mask_path needs "
        "one, white where all of it counts"
    )


def latent_mask(mask: Mask, bucket: Size, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The mask at the size of latents, fp32 in [0, 1], not all 0.

    Args:
        mask: Of the sample.
        bucket: The size in pixels at which it is trained.
        shape: Of its latents, (C, h, w) or (C, f, h, w); h and w divide the bucket's sides.

    Returns:
        (1, h, w), or (1, 1, h, w) where there are frames.

    Raises:
        DataError: The file can't be read, has no alpha channel, or is black where the picture is trained.
    """
    height, width = shape[-2:]
    pixels = np.asarray(_cut(_grey(mask), bucket), dtype=np.float64) / 255
    pixels = 1 - pixels if mask.inverted else pixels
    cells = pixels.reshape(height, bucket.height // height, width, bucket.width // width).mean((1, 3))
    if not cells.any():
        message = f"{mask.path}: the mask is black wherever its picture is trained ({bucket} pixels)"
        if mask.least == 0:
            raise DataError(f"{message}, so there would be nothing to learn; remove the picture or mend the mask")
        log.warning("%s; with mask_min_value above 0, all of it counts alike", message)
    cells = mask.least + (1 - mask.least) * cells
    whole: np.ndarray[Any, np.dtype[np.float32]] = cells.astype(np.float32)
    return whole.reshape(*[1] * (len(shape) - 2), height, width)


def _grey(mask: Mask) -> Image.Image:
    try:
        with Image.open(mask.path) as image:
            upright = ImageOps.exif_transpose(image)
            transparent = upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info
            if mask.alpha and not transparent:
                raise DataError(
                    f"{mask.path}: found a picture without an alpha channel, expected one because of alpha_mask: true"
                )
            if mask.alpha:
                return upright.convert("RGBA").getchannel("A")
            if upright.mode.startswith("I"):  # PNGs of 16 bits
                return upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
            if transparent:  # what is not there does not count
                layer = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, (0, 0, 0, 255)), layer)
            return upright.convert("L")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{mask.path}: not a readable picture: {error}") from error


def _cut(grey: Image.Image, bucket: Size) -> Image.Image:
    """As `images.load` does it with the picture."""
    plan = fit(Size(*grey.size), bucket)
    resized = grey.resize((plan.resized.width, plan.resized.height), Image.Resampling.BILINEAR)
    return resized.crop((plan.left, plan.top, plan.left + bucket.width, plan.top + bucket.height))
