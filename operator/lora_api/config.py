"""`spec.config`: the trainer's own configuration in its native snake_case keys.

The keys are the ones users of ai-toolkit already write; where that tool guesses, this one refuses.
`MUTABLE_CONFIG_PATHS` names what may change while a job runs; everything else defines the run.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lora_api.base import Native
from lora_api.patterns import CUSTOM_ARCH

MAX_RANK = 9_999_999_999  # what "full rank" means to tools that need a number


class Arch(StrEnum):
    """The built-in model families, values of `model.arch`."""

    FLUX1 = "flux1"
    FLUX2_KLEIN_4B = "flux2_klein_4b"
    FLUX2_KLEIN_9B = "flux2_klein_9b"
    SD15 = "sd15"
    SDXL = "sdxl"
    ZIMAGE = "zimage"


CUSTOM_PREFIX = "x-"
"""Begins the `model.arch` of families that other packages add; only the trainer image knows which there are."""

TEXT_ENCODER_ARCHS: tuple[Arch, ...] = (Arch.FLUX1, Arch.SD15, Arch.SDXL)
"""Built-in families whose diffusers loader takes text-encoder layers from an adapter file."""


def trains_text_encoder(arch: str) -> bool:
    """Whether `train.train_text_encoder` may be true; families of other packages answer for themselves, at the start."""
    return arch in TEXT_ENCODER_ARCHS or arch.startswith(CUSTOM_PREFIX)


class Precision(StrEnum):
    """A number format of tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def _one_line(value: str) -> str:
    if any(ord(character) < 32 for character in value):
        raise ValueError("control characters and line breaks are not allowed")
    return value


def _known_arch(value: str) -> str:
    if value in tuple(Arch) or re.fullmatch(CUSTOM_ARCH, value):
        return value
    choices = ", ".join([*Arch, f"{CUSTOM_PREFIX}... of a family that you added"])
    raise PydanticCustomError("enum", "Input should be {expected}", {"expected": choices})


Line = Annotated[str, AfterValidator(_one_line)]
Location = Annotated[Line, Field(min_length=1, max_length=1024)]
ArchName = Annotated[str, Field(min_length=1, max_length=63), AfterValidator(_known_arch)]


class ModelConfig(Native):
    """The frozen base model."""

    arch: ArchName = Field(
        description="Model family: `"
        + "`, `".join(Arch)
        + "`, or `x-...`, a family that another package adds. It alone decides how the base model is wired."
    )
    name_or_path: Location = Field(
        description="Folder of a diffusers pipeline: a local path, or s3://bucket/prefix in a store of the profile."
    )


class NetworkConfig(Native):
    """The adapter. DeltaW is scaled by alpha / rank for every family and type."""

    type: Literal["lora", "lokr"] = Field("lora", description="Adapter type.")
    linear: int = Field(16, ge=1, le=4096, description="Rank for linear layers.")
    linear_alpha: float | None = Field(
        None, gt=0, le=65536, description="Alpha for linear layers; the scale is alpha / rank. Left out: the rank."
    )
    conv: int | None = Field(
        None, ge=1, le=4096, description="Rank for convolutions, where the family has them. Left out: none are trained."
    )
    conv_alpha: float | None = Field(None, gt=0, le=65536, description="Alpha for convolutions. Left out: `conv`.")
    lokr_full_rank: bool = Field(
        True, description="LoKr only: keep the second factor whole. Rank and alpha then play no part (scale 1)."
    )
    lokr_factor: int = Field(
        -1, ge=-1, le=4096, description="LoKr only: size of the first Kronecker factor; -1 takes the most even split."
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="LoRA only: dropout before the down projection.")
    only_if_contains: tuple[Line, ...] = Field(
        (), max_length=64, description="Train only layers whose dotted name contains one of these."
    )
    ignore_if_contains: tuple[Line, ...] = Field(
        (), max_length=64, description="Skip layers whose dotted name contains one of these; wins over the other list."
    )

    @model_validator(mode="after")
    def _factor_is_not_zero(self) -> NetworkConfig:
        if self.lokr_factor == 0:
            raise ValueError("lokr_factor: 0 is neither -1 (most even split) nor a factor of at least 1")
        return self


class DatasetConfig(Native):
    """One folder of pictures with captions: `name.png` + `name.txt`, or `images/` + `captions/`."""

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


class TrainConfig(Native):
    """The optimisation."""

    steps: int = Field(
        1000, ge=1, le=10_000_000, description="Optimizer steps in all. May be raised or lowered while training."
    )
    batch_size: int = Field(1, ge=1, le=1024, description="Samples in one forward pass of each process.")
    gradient_accumulation: int = Field(
        1,
        ge=1,
        le=4096,
        description="Forward passes averaged into one optimizer step. Samples per step: batch_size x this x processes.",
    )
    lr: float = Field(
        1e-4,
        gt=0,
        le=10,
        description="Learning rate. May be changed while training; `unet_lr` and `text_encoder_lr` change in proportion.",
    )
    unet_lr: float | None = Field(None, gt=0, le=10, description="Learning rate of the denoiser. Left out: `lr`.")
    text_encoder_lr: float | None = Field(
        None, gt=0, le=10, description="Learning rate of the text encoder. Left out: `lr`."
    )
    lr_scheduler: Literal["constant", "cosine"] = Field("constant", description="Learning-rate schedule after warm-up.")
    warmup_steps: int = Field(0, ge=0, le=1_000_000, description="Steps over which the rate rises linearly from 0.")
    optimizer: Literal["adamw"] = Field("adamw", description="Optimizer.")
    weight_decay: float = Field(1e-4, ge=0, le=10, description="Decoupled weight decay of AdamW.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW beta 2.")
    adam_epsilon: float = Field(1e-8, gt=0, le=1, description="AdamW epsilon.")
    max_grad_norm: float = Field(1.0, ge=0, le=1e6, description="Global gradient norm limit; 0 switches clipping off.")
    train_unet: bool = Field(True, description="Train the denoiser (UNet or transformer).")
    train_text_encoder: bool = Field(
        False,
        description="Train the text encoder too, with `network.type: lora`. Of the built-in families: `"
        + "`, `".join(TEXT_ENCODER_ARCHS)
        + "`.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    dtype: Precision = Field(
        Precision.BF16, description="Number format of the base model and of the forward pass; adapters train in fp32."
    )
    timestep_type: Literal["logit_normal", "uniform"] | None = Field(
        None,
        description="Density of the noise levels (Esser et al. 2024, section 3.1). Left out: the family's own, "
        "logit_normal for flow matching, uniform for sd15 and sdxl.",
    )
    max_nonfinite_steps: int = Field(
        10, ge=1, le=10000, description="Steps in a row whose loss is not finite before the run stops."
    )
    seed: int = Field(42, ge=0, le=2**31 - 1, description="Seed of noise, noise levels, order and dropout.")


class SaveConfig(Native):
    """Checkpoints and the final adapter."""

    dtype: Precision = Field(Precision.BF16, description="Number format of the exported adapter; checkpoints are fp32.")
    save_every: int = Field(
        500, ge=1, le=10_000_000, description="Steps between checkpoints. May be changed while training."
    )
    max_step_saves: int = Field(
        4,
        ge=1,
        le=1000,
        description="How many checkpoints are kept; older ones are removed. May be changed while training.",
    )


class SampleConfig(Native):
    """Pictures drawn with the adapter."""

    prompts: tuple[Annotated[Line, Field(max_length=4096)], ...] = Field(
        (), max_length=64, description="One picture is drawn for each; `[trigger]` stands for the trigger word."
    )
    width: int = Field(512, ge=32, le=8192, multiple_of=16, description="Width in pixels.")
    height: int = Field(512, ge=32, le=8192, multiple_of=16, description="Height in pixels.")
    sample_steps: int = Field(20, ge=1, le=1000, description="Denoising steps.")
    guidance_scale: float = Field(4.0, ge=0, le=100, description="Classifier-free guidance scale.")
    sample_every: int = Field(
        0, ge=0, le=10_000_000, description="Steps between rounds of samples; 0 draws them only at the end."
    )
    seed: int = Field(42, ge=0, le=2**31 - 1, description="Seed of the first picture; the n-th takes seed + n.")


class TrainerConfig(Native):
    """All that the trainer is told about what to train."""

    type: Literal["diffusion_trainer"] = Field("diffusion_trainer", description="Kind of process.")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="Where to train; `auto` takes CUDA when there is one."
    )
    trigger_word: Annotated[Line, Field(max_length=256)] | None = Field(
        None, description="Put in front of captions that lack it, and in place of `[trigger]`."
    )
    performance_log_every: int = Field(
        0, ge=0, le=1_000_000, description="Steps between log lines with the time of each part of a step; 0 is off."
    )
    model: ModelConfig = Field(description="Base model.")
    network: NetworkConfig = Field(NetworkConfig(), description="Adapter.")
    datasets: tuple[DatasetConfig, ...] = Field(min_length=1, max_length=64, description="Training data.")
    train: TrainConfig = Field(TrainConfig(), description="Optimisation.")
    save: SaveConfig = Field(SaveConfig(), description="Checkpoints and export.")
    sample: SampleConfig = Field(SampleConfig(), description="Sample pictures.")

    @model_validator(mode="after")
    def _something_is_trained(self) -> TrainerConfig:
        if not self.train.train_unet and not self.train.train_text_encoder:
            raise ValueError(
                "train.train_unet: false, and train_text_encoder is false too, so nothing would be trained; set one to true"
            )
        return self

    @model_validator(mode="after")
    def _text_encoder_can_be_trained(self) -> TrainerConfig:
        if not self.train.train_text_encoder:
            return self
        if not trains_text_encoder(self.model.arch):
            raise ValueError(
                f"train.train_text_encoder: true is not supported for model.arch {self.model.arch}; set it to false"
            )
        if self.network.type != "lora":
            raise ValueError(
                "network.type: lokr can't be used with train_text_encoder: true, diffusers loads only LoRA into text encoders; "
                "set it to lora"
            )
        return self


MUTABLE_CONFIG_PATHS: tuple[tuple[str, ...], ...] = (
    ("save",),
    ("sample",),
    ("train", "steps"),
    ("train", "lr"),
)
"""Paths below `spec.config` that may change while a job runs; taken over through `control.json`."""

ALIASES: dict[str, str] = {
    "max_step_saves_to_keep": "max_step_saves",
    "caption_dropout_rate": "caption_dropout",
    "cache_latents_to_disk": "cache_latents",
    "rank": "linear",
    "alpha": "linear_alpha",
    "gradient_accumulation_steps": "gradient_accumulation",
}
"""Other tools' spellings. They are refused with the right name as suggestion."""
