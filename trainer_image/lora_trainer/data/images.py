"""Reading pictures: orientation, alpha and depth are settled here, before anything becomes a tensor."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps

from lora_trainer.data.buckets import Size, fit
from lora_trainer.errors import DataError

NORMALISATION = "exif,white,bicubic-cover,centre/1"
"""Names what this module does to pixels; part of every cache key. Change it when the pixels change."""

_ROTATED = {5, 6, 7, 8}  # EXIF orientations that swap width and height
_ORIENTATION = 0x0112


def size_of(path: Path) -> Size:
    """The size after the EXIF rotation, from the header alone.

    Raises:
        DataError: When the file can't be read as a picture.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            rotated = image.getexif().get(_ORIENTATION) in _ROTATED
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a readable picture: {_reason(error)}") from error
    return Size(height, width) if rotated else Size(width, height)


def load(path: Path, bucket: Size) -> Image.Image:
    """The picture in RGB at the size of its bucket: turned upright, transparency on white, resized, cut at the centre.

    Raises:
        DataError: When the file can't be read as a picture, also when it is cut short.
    """
    try:
        with Image.open(path) as image:
            upright = _rgb(ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a readable picture: {_reason(error)}") from error
    plan = fit(Size(*upright.size), bucket)
    resized = upright.resize((plan.resized.width, plan.resized.height), Image.Resampling.BICUBIC)
    return resized.crop((plan.left, plan.top, plan.left + bucket.width, plan.top + bucket.height))


def _rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode: transparency is laid on white, 16-bit grey scaled to 8 bits instead of clipped."""
    if image.mode.startswith("I"):  # I, I;16, I;16B: PNGs of 16 bits
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    return str(error).split(" '/")[0].split(": '/")[0] or type(error).__name__
