"""The samples of a run for its report: small, embedded, side by side by step."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lora_api import layout
from lora_api.store import Store

_SIDE = 256  # pixels of a thumbnail's longer side
_MOST_ROUNDS = 8
_MOST_PROMPTS = 16


@dataclass(frozen=True)
class Thumbnail:
    """A sample as it is embedded."""

    link: str  # to the picture itself, relative to the final folder
    data: str  # a data: URL


@dataclass(frozen=True)
class Gallery:
    """Samples by prompt and round; rounds are steps, the last one is the result's."""

    rounds: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Thumbnail]]  # by prompt, then by round


def read_gallery(store: Store, drawn: Sequence[Path]) -> Gallery:
    """The samples in the run directory, and those that were drawn just now.

    Args:
        store: The run directory.
        drawn: The result's samples.

    Raises:
        StoreError: When the store can't be used.
    """
    found: dict[str, list[str]] = {}
    for item in store.list(layout.SAMPLES):
        folder, _, name = item.key.rpartition("/")
        if name.endswith(".png"):
            found.setdefault(folder, []).append(name)
    rows: dict[str, dict[str, Thumbnail]] = {}
    titles: list[str] = []
    for folder in evenly(sorted(found), _MOST_ROUNDS):
        for name in sorted(found[folder])[:_MOST_PROMPTS]:
            data = store.get(f"{folder}/{name}")
            if data is not None:
                _add(rows, titles, data, f"../{folder}/{name}")
    for path in [path for path in drawn if path.suffix == ".png"][:_MOST_PROMPTS]:
        _add(rows, titles, path.read_bytes(), f"sample-{path.name}", title="result")
    return Gallery(tuple(titles), rows)


def evenly(names: Sequence[str], most: int) -> list[str]:
    """At most `most` of them, the first and the last included."""
    if len(names) <= most:
        return list(names)
    return [names[round(number * (len(names) - 1) / (most - 1))] for number in range(most)]


def _add(
    rows: dict[str, dict[str, Thumbnail]], titles: list[str], data: bytes, link: str, title: str | None = None
) -> None:
    """Puts a picture where the texts in it say that it belongs."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            prompt = str(picture.info.get("prompt", f"sample {Path(link).stem.removeprefix('sample-')}"))
            title = title or f"step {picture.info.get('step', Path(link).parent.name.removeprefix('step-'))}"
            small = picture.convert("RGB")
            small.thumbnail((_SIDE, _SIDE))
    except OSError:
        return  # not readable: nothing to show
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    if title not in titles:
        titles.append(title)
    rows.setdefault(prompt, {})[title] = Thumbnail(link, url)
