"""Finding pictures, clips and their captions in a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.data.clips import CLIP_ENDINGS
from lora_trainer.errors import DataError

PICTURE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp"})
_PICTURES, _CAPTIONS = "images", "captions"


@dataclass(frozen=True)
class Picture:
    """A picture or video file and the caption file that belongs to it."""

    path: Path
    caption: Path | None

    @property
    def is_clip(self) -> bool:
        """Whether it is a video file."""
        return self.path.suffix.lower() in CLIP_ENDINGS


def scan(folder: Path, caption_ending: str, field: str, *, clips: bool = False) -> list[Picture]:
    """All pictures below a folder, in the order of their relative paths. Hidden files and folders are skipped.

    A caption stands beside its picture, or under `captions/` where the picture is under `images/`.

    Args:
        folder: Where to look, recursively.
        caption_ending: `txt`, with or without a dot.
        field: Path of the configuration field, for messages.
        clips: Take video files, too.

    Raises:
        DataError: When the folder is missing or has no pictures.
    """
    if not folder.is_dir():
        raise DataError(f"{field}: {folder} is not a folder")
    ending = "." + caption_ending.removeprefix(".")
    files = sorted(_visible_files(folder), key=lambda path: path.relative_to(folder).as_posix())
    endings = PICTURE_ENDINGS | CLIP_ENDINGS if clips else PICTURE_ENDINGS
    pictures = [Picture(path, _caption_of(path, folder, ending)) for path in files if path.suffix.lower() in endings]
    if not pictures:
        what, kinds = "pictures or clips" if clips else "pictures", " ".join(sorted(endings))
        videos = sum(path.suffix.lower() in CLIP_ENDINGS for path in files)
        hint = f"; {videos} are clips, which are taken where num_frames is above 1" if videos else ""
        raise DataError(f"{field}: no {what} in {folder}: {len(files)} other files, none of them {kinds}{hint}")
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
