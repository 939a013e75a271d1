"""Aspect buckets: the size at which a picture is trained.

A picture fills at most the area of the asked square, keeps its aspect ratio up to the family's size multiple, and is
never enlarged. Equal sizes form a bucket; a batch comes from one bucket.

References:
    Same rule as ai-toolkit's `toolkit/buckets.py`, except that a side is never rounded up past the picture's own.
    Checked in tests/unit/test_trainer_buckets.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Size:
    """Width and height in pixels."""

    width: int
    height: int

    @property
    def area(self) -> int:
        """Pixels."""
        return self.width * self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Fit:
    """How a picture becomes its bucket: resized to `resized` (covers the bucket), then the box cut from its centre."""

    resized: Size
    left: int
    top: int


class TooSmallError(ValueError):
    """A picture has a side shorter than the size multiple."""


def bucket_of(picture: Size, resolution: int, multiple: int) -> Size:
    """The size of the bucket for a picture.

    Args:
        picture: Size after the EXIF rotation.
        resolution: Side in pixels of the square whose area may be filled.
        multiple: Both sides of a bucket are multiples of this, in pixels.

    Raises:
        TooSmallError: When a side of the picture is shorter than `multiple`.
    """
    if min(picture.width, picture.height) < multiple:
        raise TooSmallError(f"{picture} pixels; at least {multiple}x{multiple} are needed")
    limit = max(resolution * resolution, multiple * multiple)
    target = min(picture.area, limit)
    scale = math.sqrt(target / picture.area)
    candidates = [
        Size(width, height)
        for width in _roundings(picture.width * scale, picture.width, multiple)
        for height in _roundings(picture.height * scale, picture.height, multiple)
    ]
    fitting = [size for size in candidates if size.area <= limit]
    if fitting:
        return max(fitting, key=lambda size: (size.area, -abs(_log_aspect(size) - _log_aspect(picture))))
    return _sliver(picture, limit, multiple)


def fit(picture: Size, bucket: Size) -> Fit:
    """Resize and centre crop that turn a picture into its bucket; the scale is at most 1."""
    scale = max(bucket.width / picture.width, bucket.height / picture.height)
    resized = Size(max(bucket.width, round(picture.width * scale)), max(bucket.height, round(picture.height * scale)))
    return Fit(resized, (resized.width - bucket.width) // 2, (resized.height - bucket.height) // 2)


def _roundings(side: float, longest: int, multiple: int) -> set[int]:
    """The multiples next to `side`, from one up to what the picture has."""
    down = math.floor(side / multiple) * multiple
    most = longest // multiple * multiple
    return {min(max(value, multiple), most) for value in (down, down + multiple)}


def _sliver(picture: Size, limit: int, multiple: int) -> Size:
    """For pictures so long that the short side is below one multiple: one multiple high, as long as the area allows."""
    longest = max(picture.width, picture.height)
    long_side = min(longest, limit // multiple) // multiple * multiple
    return Size(long_side, multiple) if picture.width >= picture.height else Size(multiple, long_side)


def _log_aspect(size: Size) -> float:
    return math.log(size.width / size.height)
