"""Filling the cache: every picture and every caption is encoded once, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lora_trainer.data.cache import TensorCache, latents_key, mask_key, text_key
from lora_trainer.data.clips import load_frames
from lora_trainer.data.images import load
from lora_trainer.data.masks import latent_mask
from lora_trainer.data.samples import Sample

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

Report = Callable[[str], None]


def pixels_of(sample: Sample) -> Tensor:
    """The picture as (1, 3, H, W) fp32 in [-1, 1], or the clip as (1, 3, F, H, W).

    Raises:
        DataError: When the file can't be read as a picture or clip.
    """
    if sample.frames:
        clip = load_frames(sample.picture, sample.bucket, sample.frames).astype(np.float32)
        return torch.from_numpy(clip).permute(3, 0, 1, 2).unsqueeze(0).div(127.5).sub(1.0)
    picture = np.asarray(load(sample.picture, sample.bucket), dtype=np.float32)
    return torch.from_numpy(picture).permute(2, 0, 1).unsqueeze(0).div(127.5).sub(1.0)


def encode_pictures(
    samples: Sequence[Sample], model: BaseModel, cache: TensorCache, *, share: tuple[int, int], report: Report
) -> None:
    """Encodes the pictures that are to be cached and are not yet.

    Args:
        samples: All samples of the run.
        model: Its VAE encodes.
        cache: Where latents go.
        share: (number of this process, number of processes) that do this together.
        report: Told `encoding 5/12 pictures`.

    Raises:
        DataError: When a file can't be read as a picture.
    """
    wanted = {latents_key(s, model.latents_identity): s for s in samples if s.cached}
    mine = [(key, sample) for key, sample in list(wanted.items())[share[0] :: share[1]] if not cache.holds(key)]
    for number, (key, sample) in enumerate(mine, 1):
        report(f"encoding {number}/{len(mine)} pictures")
        cache.store(key, {"latents": model.encode_pixels(pixels_of(sample))})


def encode_masks(
    samples: Sequence[Sample], model: BaseModel, cache: TensorCache, *, share: tuple[int, int], report: Report
) -> None:
    """Brings the masks of cached pictures to the size of their latents; arguments and errors as in `encode_pictures`.

    Called when the latents of the same share are cached: their size is that of the mask.
    """
    wanted = {latents_key(s, model.latents_identity): s for s in samples if s.cached}
    mine = set(list(wanted)[share[0] :: share[1]])
    masks = {mask_key(s, model.latents_identity): s for s in samples if s.cached and s.mask is not None}
    left = [(k, s) for k, s in masks.items() if latents_key(s, model.latents_identity) in mine and not cache.holds(k)]
    for number, (key, sample) in enumerate(left, 1):
        report(f"reading {number}/{len(left)} masks")
        latents = cache.load(latents_key(sample, model.latents_identity))["latents"]
        cache.store(key, {"mask": mask_like(sample, latents)})


def mask_like(sample: Sample, latents: Tensor) -> Tensor:
    """The mask of a sample, fp32, (1, h, w) for latents (C, h, w), (1, 1, h, w) for (C, f, h, w).

    Raises:
        DataError: See `masks.latent_mask`.
    """
    assert sample.mask is not None
    return torch.from_numpy(latent_mask(sample.mask, sample.bucket, latents.shape))


def encode_captions(
    texts: Sequence[str], model: BaseModel, cache: TensorCache, *, share: tuple[int, int], report: Report
) -> None:
    """Encodes the captions that are not cached yet; arguments as in `encode_pictures`."""
    wanted = {text_key(text, model.text_identity): text for text in dict.fromkeys(texts)}
    mine = [(key, text) for key, text in list(wanted.items())[share[0] :: share[1]] if not cache.holds(key)]
    for number, (key, text) in enumerate(mine, 1):
        report(f"encoding {number}/{len(mine)} captions")
        cache.store(key, model.encode_text(text))


def captions_of(samples: Sequence[Sample]) -> list[str]:
    """Every caption that training can ask for, each once."""
    texts = [sample.caption for sample in samples]
    texts += [sample.dropped_caption for sample in samples if sample.dropout > 0]
    return list(dict.fromkeys(texts))
