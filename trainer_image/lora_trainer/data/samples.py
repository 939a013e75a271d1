"""The plan of a dataset: which picture is trained at which size with which caption. No pixels yet, no torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_api.config import DatasetConfig
from lora_trainer.data import captions
from lora_trainer.data.buckets import Size, TooSmallError, bucket_of
from lora_trainer.data.images import size_of
from lora_trainer.data.scan import Picture, scan
from lora_trainer.errors import DataError


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


def plan_samples(
    datasets: Sequence[tuple[Path, DatasetConfig]],
    *,
    trigger: str | None,
    multiple: int,
    prints: Fingerprints,
    report: Callable[[str], None] = lambda text: None,  # noqa: ARG005 - says nothing
) -> list[Sample]:
    """The samples of all datasets, `num_repeats` times for each resolution, in an order that depends on names alone.

    Args:
        datasets: Local folder and configuration of each.
        trigger: `trigger_word`.
        multiple: The family's size multiple in pixels.
        prints: Knows the content hash and the size of pictures.
        report: Told what is being done.

    Raises:
        DataError: Names the file or folder that can't be used.
    """
    samples: list[Sample] = []
    for number, (folder, config) in enumerate(datasets):
        field = f"config.datasets[{number}]"
        pictures = scan(folder, config.caption_ext, f"{field}.folder_path")
        once: list[Sample] = []
        for done, picture in enumerate(pictures, 1):
            report(f"reading {done}/{len(pictures)} pictures of {config.folder_path}")
            once += _samples_of(picture, config, trigger, multiple, prints)
        samples += [sample for sample in once for _ in range(config.num_repeats)]
    return samples


def _samples_of(
    picture: Picture, config: DatasetConfig, trigger: str | None, multiple: int, prints: Fingerprints
) -> list[Sample]:
    caption = captions.with_trigger(captions.read_caption(picture.caption, config.default_caption), trigger)
    sha256, size = prints.of(picture.path)
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
        )
        for bucket in buckets
    ]


def digest(samples: Sequence[Sample]) -> str:
    """Sixteen hex digits over pictures, sizes and captions: names the data that an adapter was trained on."""
    lines = [f"{s.sha256} {s.bucket} {hashlib.sha256(s.caption.encode()).hexdigest()}" for s in samples]
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
        """The sha256 of a picture's bytes, and its size after the EXIF rotation.

        Raises:
            DataError: When it can't be read.
        """
        try:
            stat = path.stat()
            key = f"{path.absolute()}|{stat.st_size}|{stat.st_mtime_ns}"
            known = self._known.get(key)
            if known is None:
                size = size_of(path)
                with path.open("rb") as file:
                    known = [hashlib.file_digest(file, "sha256").hexdigest(), size.width, size.height]
                self._known[key] = known
                self._changed = True
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from error
        sha256, width, height = known
        return str(sha256), Size(int(str(width)), int(str(height)))

    def save(self) -> None:
        """Writes the memory, whole or not at all."""
        if self._memory is None or not self._changed:
            return
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._memory.parent)
        with os.fdopen(handle, "w") as out:
            json.dump(self._known, out)
        Path(name).replace(self._memory)
