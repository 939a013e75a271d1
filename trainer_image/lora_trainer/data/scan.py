"""Finding pictures and their captions in a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.errors import DataError

PICTURE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp"})
_PICTURES, _CAPTIONS = "images", "captions"


@dataclass(frozen=True)
class Picture:
    """A picture file and the caption file that belongs to it."""

    path: Path
    caption: Path | None


def scan(folder: Path, caption_ending: str, field: str) -> list[Picture]:
    """All pictures below a folder, in the order of their relative paths. Hidden files and folders are skipped.

    A caption stands beside its picture, or under `captions/` where the picture is under `images/`.

    Args:
        folder: Where to look, recursively.
        caption_ending: `txt`, with or without a dot.
        field: Path of the configuration field, for messages.

    Raises:
        DataError: When the folder is missing or has no pictures.
    """
    if not folder.is_dir():
        raise DataError(f"{field}: {folder} is not a folder")
    ending = "." + caption_ending.removeprefix(".")
    files = sorted(_visible_files(folder), key=lambda path: path.relative_to(folder).as_posix())
    pictures = [
        Picture(path, _caption_of(path, folder, ending)) for path in files if path.suffix.lower() in PICTURE_ENDINGS
    ]
    if not pictures:
        kinds = " ".join(sorted(PICTURE_ENDINGS))
        raise DataError(f"{field}: no pictures in {folder}: {len(files)} other files, none of them {kinds}")
    return pictures


def _visible_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return found


def _caption_of(picture: Path, folder: Path, ending: str) -> Path | None:
    beside = picture.with_suffix(ending)
    if beside.is_file():
        return beside
    relative = picture.relative_to(folder)
    if relative.parts[0] == _PICTURES:
        apart = folder.joinpath(_CAPTIONS, *relative.parts[1:]).with_suffix(ending)
        if apart.is_file():
            return apart
    return None
