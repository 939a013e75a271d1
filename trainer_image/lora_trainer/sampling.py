"""Sample pictures: one for each prompt, the same at every call with the same adapter and seed."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
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
    on_drawn: Callable[[int], None] = lambda drawn: None,  # noqa: ARG005 a callback that does nothing
) -> list[Path]:
    """Draws one picture for each condition and saves it as `00.png`, `01.png` ... in `folder`.

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
        on_drawn: Called after each picture with the number drawn so far.

    Returns:
        The files, in the order of the conditions.
    """
    paths = []
    for index, condition in enumerate(conditions):
        picture = model.sample(
            condition,
            negative_condition,
            width=width,
            height=height,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed + index,
        )
        paths.append(save_png(picture, folder / f"{index:02d}.png"))
        on_drawn(index + 1)
    return paths


def save_png(picture: Image.Image, path: Path) -> Path:
    """Writes a PNG, whole or not at all; the same picture gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return path
