"""`spec.config.datasets`: the training data."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from lora_api.archs import FRAME_STEP
from lora_api.base import Native
from lora_api.locations import Line, Location
from lora_api.order import MAX_POINTS, WeightPoint


def _clip_length(value: int) -> int:
    if value % FRAME_STEP != 1:
        raise ValueError(f"{value} is not {FRAME_STEP}k + 1 frames; write {_nearest_clip_length(value)}")
    return value


def _nearest_clip_length(frames: int) -> int:
    return max(1, frames // FRAME_STEP * FRAME_STEP + 1)


Frames = Annotated[int, Field(ge=1, le=1025), AfterValidator(_clip_length)]


class DatasetConfig(Native):
    """One folder of pictures or clips with captions: `name.png` + `name.txt`, or `images/` + `captions/`."""

    folder_path: Location = Field(description="Local folder or s3://bucket/prefix. Searched recursively.")
    caption_ext: Annotated[Line, Field(min_length=1, max_length=16)] = Field(
        "txt", description="Ending of the caption files that stand beside the pictures."
    )
    default_caption: Annotated[Line, Field(max_length=4096)] = Field(
        "", description="Caption of pictures that have none."
    )
    resolution: tuple[Annotated[int, Field(ge=32, le=8192)], ...] = Field(
        (512,),
        min_length=1,
        max_length=8,
        description="Pixels on the side of the square whose area a picture may fill; each value adds one copy of the "
        "dataset. Aspect ratios are kept in buckets; pictures are never enlarged.",
    )
    caption_dropout: float = Field(0.0, ge=0.0, le=1.0, description="Share of samples trained with an empty caption.")
    cache_latents: bool = Field(
        True, description="Keep encoded pictures on disk, by content hash, outside the dataset folder."
    )
    num_repeats: int = Field(1, ge=1, le=10000, description="How often each picture counts in one epoch.")
    weight: tuple[WeightPoint, ...] = Field(
        (),
        max_length=MAX_POINTS,
        description="Share of the batches that are of this dataset, as points over the steps: `[{value: 3}]` beside "
        "`[{value: 1}]` is three of four, whatever the sizes. Left out in all datasets: by size times `num_repeats`.",
    )
    is_reg: bool = Field(
        False,
        description="A regularisation set: pictures of the class, for prior preservation (Ruiz et al. 2023, section 3.2). "
        "They get no trigger word, and their loss is weighed by `train.reg_weight`.",
    )
    num_frames: Frames = Field(
        1,
        description="Frames of each clip, 4k + 1 of them, for families that make videos. 1: pictures only; more: clips, "
        "and pictures as clips of one frame.",
    )
    shrink_video_to_frames: bool = Field(
        True,
        description="Take the frames evenly over the whole clip, from its first to its last. False: take them at `fps`, "
        "each repeat of a clip from a place of its own.",
    )
    fps: int = Field(
        24, ge=1, le=240, description="Frames per second that are taken where `shrink_video_to_frames` is false."
    )
    mask_path: Location | None = Field(
        None,
        description="Folder with a grey picture of the same name for each picture or clip: white is trained, black is not. "
        "Local, or s3://bucket/prefix.",
    )
    alpha_mask: bool = Field(False, description="Take the alpha channel of each picture for its mask.")
    invert_mask: bool = Field(False, description="Train the black and not the white.")
    mask_min_value: float = Field(
        0.0, ge=0, lt=1, description="How much the black of a mask counts; white counts 1, grey what lies between."
    )

    @model_validator(mode="after")
    def _masks_have_one_source(self) -> DatasetConfig:
        if self.mask_path is not None and self.alpha_mask:
            raise ValueError("alpha_mask: true excludes mask_path; keep one of them")
        if self.mask_path is None and not self.alpha_mask:
            for name, changed in (("invert_mask", self.invert_mask), ("mask_min_value", self.mask_min_value > 0)):
                if changed:
                    raise ValueError(f"{name}: plays no part without a mask; set mask_path or alpha_mask, or remove it")
        return self
