"""The plan of a dataset: which picture or which frames of a clip are trained at which size with which caption. No pixels yet, no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_api.datasets import DatasetConfig
from lora_trainer.data import captions
from lora_trainer.data.buckets import Size, TooSmallError, bucket_of
from lora_trainer.data.clips import CLIP_ENDINGS, Clip, clip_of, frames_at, frames_over
from lora_trainer.data.images import size_of
from lora_trainer.data.masks import Mask, mask_of
from lora_trainer.data.scan import Picture, scan
from lora_trainer.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One picture at one size with its caption."""

    picture: Path
    sha256: str  # of the picture's bytes
    bucket: Size
    caption: str
    dropped_caption: str  # what is trained when the caption is dropped
    dropout: float  # how often that is
    cached: bool  # whether its latents are kept on disk
    frames: tuple[int, ...] = ()  # of a clip, the numbers of those that are taken; of a picture none
    dataset: int = 0  # number of the dataset that it is of
    is_reg: bool = False  # whether that is a regularisation set
    mask: Mask | None = None  # where it counts in the loss; None: everywhere

    @property
    def group(self) -> tuple[Size, int]:
        """What samples of one batch have in common."""
        return self.bucket, len(self.frames)


def described(samples: Sequence[Sample]) -> str:
    """A batch in words: `2 pictures of 1024 x 1024`."""
    size, frames = samples[0].group
    several = "s" if len(samples) > 1 else ""
    kind = f"clip{several} of {frames} frames of" if frames else f"picture{several} of"
    return f"{len(samples)} {kind} {size.width} x {size.height}"


def plan_samples(
    datasets: Sequence[tuple[Path, DatasetConfig]],
    *,
    trigger: str | None,
    multiple: int,
    prints: Fingerprints,
    masks: Sequence[Path | None] = (),
    report: Callable[[str], None] = lambda text: None,  # noqa: ARG005 - says nothing
) -> list[Sample]:
    """The samples of all datasets, `num_repeats` times for each resolution, in an order that depends on names alone.

    Args:
        datasets: Local folder and configuration of each.
        trigger: `trigger_word`.
        multiple: The family's size multiple in pixels.
        prints: Knows the content hash and the size of pictures.
        masks: Local folder of the masks of each dataset; empty where there are none.
        report: Told what is being done.

    Raises:
        DataError: Names the file or folder that can't be used.
    """
    samples: list[Sample] = []
    for number, (folder, config) in enumerate(datasets):
        field = f"config.datasets[{number}]"
        pictures = scan(folder, config.caption_ext, f"{field}.folder_path", clips=config.num_frames > 1)
        once: list[Sample] = []
        folders = folder, masks[number] if masks else None
        for done, picture in enumerate(pictures, 1):
            report(f"reading {done}/{len(pictures)} pictures of {config.folder_path}")
            words = None if config.is_reg else trigger
            mask = mask_of(picture, config, folders, prints.of)
            once += [replace(each, mask=mask) for each in _samples_of(picture, config, words, multiple, prints)]
        samples += [
            replace(_repeated(sample, config, repeat, prints), dataset=number, is_reg=config.is_reg)
            for sample in once
            for repeat in range(config.num_repeats)
        ]
    return samples


def _repeated(sample: Sample, config: DatasetConfig, repeat: int, prints: Fingerprints) -> Sample:
    """A sample for one of its repeats: of a clip that is taken at a rate, each has a beginning of its own."""
    if not sample.frames or config.shrink_video_to_frames:
        return sample
    seed = (int(sample.sha256[:12], 16) << 14) + repeat
    frames = frames_at(prints.clip(sample.picture), config.num_frames, config.fps, seed=seed)
    return replace(sample, frames=frames)


def _samples_of(
    picture: Picture, config: DatasetConfig, trigger: str | None, multiple: int, prints: Fingerprints
) -> list[Sample]:
    caption = captions.with_trigger(captions.read_caption(picture.caption, config.default_caption), trigger)
    sha256, size = prints.of(picture.path)
    frames = frames_over(prints.clip(picture.path), config.num_frames) if picture.is_clip else ()
    if len(set(frames)) < len(frames):
        log.warning(
            "%s: has %d frames, fewer than num_frames: %d; some are shown more than once",
            picture.path, len(set(frames)), config.num_frames,
        )  # fmt: skip
    try:
        buckets = [bucket_of(size, resolution, multiple) for resolution in config.resolution]
    except TooSmallError as error:
        raise DataError(f"{picture.path}: the picture is too small: {error}") from error
    return [
        Sample(
            picture.path,
            sha256,
            bucket,
            caption,
            captions.dropped(trigger),
            config.caption_dropout,
            config.cache_latents,
            frames,
        )
        for bucket in buckets
    ]


def digest(samples: Sequence[Sample]) -> str:
    """Sixteen hex digits over pictures, sizes, frames and captions: names the data that an adapter was trained on."""

    def frames(sample: Sample) -> str:
        mask = () if sample.mask is None else ("mask", str(sample.mask))
        return " ".join(map(str, ("", *sample.frames, *mask)))

    lines = [f"{s.sha256} {s.bucket}{frames(s)} {hashlib.sha256(s.caption.encode()).hexdigest()}" for s in samples]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


class Fingerprints:
    """Content hash and size of pictures, remembered by path, bytes and modification time.

    Args:
        memory: JSON file that outlives the process; lies in the cache folder, never in the dataset's.
    """

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._known: dict[str, list[object]] = {}
        self._changed = False
        if memory is not None and memory.is_file():
            try:
                self._known = dict(json.loads(memory.read_text()))
            except (OSError, ValueError):
                self._known = {}

    def of(self, path: Path) -> tuple[str, Size]:
        """The sha256 of the bytes of a picture or clip, and its size upright.

        Raises:
            DataError: When it can't be read.
        """
        sha256, width, height, *_ = self._lookup(path)
        return str(sha256), Size(int(str(width)), int(str(height)))

    def clip(self, path: Path) -> Clip:
        """Size, number of frames and rate of a clip.

        Raises:
            DataError: When it can't be read.
        """
        _, width, height, frames, fps = self._lookup(path)
        return Clip(Size(int(str(width)), int(str(height))), int(str(frames)), float(str(fps)))

    def _lookup(self, path: Path) -> list[object]:
        try:
            stat = path.stat()
            key = f"{path.absolute()}|{stat.st_size}|{stat.st_mtime_ns}"
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _measured(path)
                self._changed = True
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        return known

    def save(self) -> None:
        """Writes the memory, whole or not at all."""
        if self._memory is None or not self._changed:
            return
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._memory.parent)
        with os.fdopen(handle, "w") as out:
            json.dump(self._known, out)
        Path(name).replace(self._memory)


def _measured(path: Path) -> list[object]:
    """sha256, width and height; of a clip also the number of frames and their rate."""
    facts: list[object]
    if path.suffix.lower() in CLIP_ENDINGS:
        clip = clip_of(path)
        facts = [clip.size.width, clip.size.height, clip.frames, clip.fps]
    else:
        size = size_of(path)
        facts = [size.width, size.height]
    with path.open("rb") as file:
        return [hashlib.file_digest(file, "sha256").hexdigest(), *facts]
