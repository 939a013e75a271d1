"""Sample pictures or clips: one for each prompt, the same at every call with the same adapter and seed."""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from lora_trainer.families.base import BaseModel


def draw_samples(
    model: BaseModel,
    conditions: Sequence[dict[str, Tensor]],
    negative_condition: dict[str, Tensor] | None,
    folder: Path,
    *,
    width: int,
    height: int,
    steps: int,
    guidance_scale: float,
    seed: int,
    num_frames: int = 1,
    fps: int = 16,
    texts: Sequence[Mapping[str, str]] = (),
    on_drawn: Callable[[int], None] = lambda drawn: None,  # noqa: ARG005 a callback that does nothing
) -> list[Path]:
    """Draws one picture for each condition and saves it as `00.png`, `01.png` ... in `folder`.

    A clip is saved twice: as `00.webp`, which plays, and as `00.png`, with its frames side by side.

    The n-th picture takes the seed `seed + n`, so that adding a prompt at the end changes no other picture.

    Args:
        model: Base model with the adapter; may have freed its encoders.
        conditions: What `encode_text` returned for each prompt.
        negative_condition: The same for the empty prompt; None draws without guidance.
        folder: Created when it is missing.
        width: In pixels, a multiple of 16.
        height: In pixels, a multiple of 16.
        steps: Denoising steps.
        guidance_scale: Handed to the family's pipeline.
        seed: Of the first picture.
        num_frames: Of each clip, for families that make them.
        fps: At which clips play.
        texts: For each condition what its PNG says about itself, by keyword: the prompt and the like.
        on_drawn: Called after each picture with the number drawn so far.

    Returns:
        The files, in the order of the conditions.
    """
    paths = []
    for index, condition in enumerate(conditions):
        frames = model.sample_frames(
            condition,
            negative_condition,
            width=width,
            height=height,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed + index,
            num_frames=num_frames,
        )
        if len(frames) > 1:
            paths.append(save_clip(frames, folder / f"{index:02d}.webp", fps))
        paths.append(save_png(side_by_side(frames), folder / f"{index:02d}.png", texts[index] if texts else {}))
        on_drawn(index + 1)
    return paths


@contextmanager
def each_pass(model: BaseModel, called: Callable[[], None]) -> Iterator[None]:
    """Inside, `called` is called after every pass through a denoiser: a sample of a big model takes minutes."""
    modules = [getattr(model.pipe, name) for name in model.export_parts.values()]
    handles = [module.register_forward_hook(lambda *_: called()) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def side_by_side(frames: Sequence[Image.Image]) -> Image.Image:
    """All frames in one picture, in rows; a single frame as it is."""
    if len(frames) == 1:
        return frames[0]
    width, height = frames[0].size
    columns = math.ceil(math.sqrt(len(frames)))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(frames) / columns) * height))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (number % columns * width, number // columns * height))
    return sheet


def save_clip(frames: Sequence[Image.Image], path: Path, fps: int) -> Path:
    """Writes an animated WebP, whole or not at all; the same frames give the same bytes."""
    buffer = io.BytesIO()
    duration_ms = round(1000 / fps)
    frames[0].save(
        buffer, "WEBP", save_all=True, append_images=list(frames[1:]), duration=duration_ms, loop=0, quality=90
    )
    return _write(buffer.getvalue(), path)


def save_png(picture: Image.Image, path: Path, texts: Mapping[str, str] | None = None) -> Path:
    """Writes a PNG with texts, whole or not at all; the same picture and texts give the same bytes."""
    buffer = io.BytesIO()
    information = PngInfo()
    for keyword, text in (texts or {}).items():
        information.add_itxt(keyword, text)
    picture.save(buffer, format="PNG", pnginfo=information)
    return _write(buffer.getvalue(), path)


def _write(content: bytes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return path
