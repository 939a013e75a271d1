"""Reading clips: which frames are taken, and their pixels.

Frames are known by their number in the order in which they are shown. A clip is decoded once from its beginning to its
end when it is first seen, so that the number of its frames is what the decoder gives and not what a header says.

References:
    Frames over the whole clip, or at a rate: the two ways of ai-toolkit's `shrink_video_to_frames` and `fps`.
    Checked in tests/trainer/test_clips.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.data.buckets import Size, fit
from lora_trainer.data.sampler import mix
from lora_trainer.errors import DataError

CLIP_ENDINGS = frozenset({".mp4", ".avi", ".mov", ".webm", ".mkv"})

CLIP_NORMALISATION = "upright,bicubic-cover,centre,frames/1"
"""Names what this module does to frames; part of the cache key of clips. Change it when the pixels change."""

_QUARTER_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


@dataclass(frozen=True)
class Clip:
    """What a video file holds."""

    size: Size  # upright
    frames: int
    fps: float  # on average


def clip_of(path: Path) -> Clip:
    """Size, number of frames and rate of a clip.

    Raises:
        DataError: When the file can't be decoded to its end, or holds no video.
    """
    frames, size = 0, Size(0, 0)
    with _opened(path) as (container, stream):
        rate = float(stream.average_rate or stream.guessed_rate or Fraction(0))
        for frame in container.decode(stream):
            if frames == 0:
                size = _upright_size(frame)
            frames += 1
    if frames == 0 or rate <= 0:
        raise DataError(
            f"{path}: the video has {frames} frames at {rate:g} frames per second; nothing can be taken from it"
        )
    return Clip(size, frames, rate)


def frames_over(clip: Clip, count: int) -> tuple[int, ...]:
    """`count` frame numbers evenly over a clip, its first and last among them; a short clip repeats some."""
    if count == 1:
        return (0,)
    return tuple(round(number * (clip.frames - 1) / (count - 1)) for number in range(count))


def frames_at(clip: Clip, count: int, fps: int, *, seed: int) -> tuple[int, ...]:
    """`count` frame numbers at `fps`, from a place in the clip that `seed` chooses; evenly over it when it is too short.

    A clip that is slower than `fps` shows some of its frames more than once.
    """
    step = clip.fps / fps
    last = round((count - 1) * step)
    if last > clip.frames - 1:
        return frames_over(clip, count)
    start = mix(seed) % (clip.frames - last)
    return tuple(start + round(number * step) for number in range(count))


def load_frames(path: Path, bucket: Size, numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The chosen frames at the size of the bucket, (F, H, W, 3).

    Raises:
        DataError: When the file can't be decoded, or has fewer frames than it had.
    """
    wanted, found = set(numbers), {}
    with _opened(path) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                found[number] = np.asarray(_fitted(_upright(frame), bucket))
            if number >= max(wanted):
                break
    if missing := wanted - found.keys():
        raise DataError(f"{path}: frame {min(missing)} is missing; the file has changed since it was first read")
    return np.stack([found[number] for number in numbers])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; what decoding raises inside names the file."""
    try:
        import av
    except ImportError as error:
        raise DataError(f"{path}: clips need the package av, which is not installed here") from error
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DataError(f"{path}: holds no video")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a readable video: {str(error).split(': ')[0]}") from error


def _upright_size(frame: Any) -> Size:
    turned = round(frame.rotation) % 180 == 90
    return Size(frame.height, frame.width) if turned else Size(frame.width, frame.height)


def _upright(frame: Any) -> Image.Image:
    """The frame as its display matrix turns it; `rotation` is counter-clockwise, in degrees."""
    picture: Image.Image = frame.to_image()
    turn = _QUARTER_TURNS.get(round(frame.rotation) % 360)
    return picture if turn is None else picture.transpose(turn)


def _fitted(picture: Image.Image, bucket: Size) -> Image.Image:
    plan = fit(Size(*picture.size), bucket)
    resized = picture.resize((plan.resized.width, plan.resized.height), Image.Resampling.BICUBIC)
    return resized.crop((plan.left, plan.top, plan.left + bucket.width, plan.top + bucket.height))
