"""`spec.config`: the trainer's own configuration in its native snake_case keys.

The keys are the ones users of ai-toolkit already write; where that tool guesses, this one refuses.
`MUTABLE_CONFIG_PATHS` names what may change while a job runs; everything else defines the run.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from lora_api.archs import (
    FRAME_STEP,
    TEXT_ENCODER_ARCHS,
    VIDEO_ARCHS,
    Arch,
    ArchName,
    knows_original_layers,
    trains_text_encoder,
)
from lora_api.base import Native
from lora_api.locations import Line, Location, ModelLocation
from lora_api.network import NetworkConfig

SINGLE_FILE = ".safetensors"  # ending of a location that is one file


class Precision(StrEnum):
    """A number format of tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def _clip_length(value: int) -> int:
    if value % FRAME_STEP != 1:
        raise ValueError(f"{value} is not {FRAME_STEP}k + 1 frames; write {_nearest_clip_length(value)}")
    return value


def _nearest_clip_length(frames: int) -> int:
    return max(1, frames // FRAME_STEP * FRAME_STEP + 1)


Frames = Annotated[int, Field(ge=1, le=1025), AfterValidator(_clip_length)]


class ModelConfig(Native):
    """The frozen base model."""

    arch: ArchName = Field(
        description="Model family: `"
        + "`, `".join(Arch)
        + "`, or `x-...`, a family that another package adds. It alone decides how the base model is wired."
    )
    name_or_path: ModelLocation = Field(
        description="Folder of a diffusers pipeline: a local path, s3://bucket/prefix in a store of the profile, or "
        "hf://org/repo@revision. Or the denoiser alone, a path that ends in `.safetensors`."
    )
    extras_name_or_path: ModelLocation | None = Field(
        None,
        description="Folder with all other components, and the denoiser's configuration, where `name_or_path` is one "
        "`.safetensors` file.",
    )
    assistant_lora_path: ModelLocation | None = Field(
        None,
        description="LoRA file of a training adapter, for bases that are distilled (`zimage:turbo`): part of the base "
        "model while training, taken out of it for samples.",
    )

    @model_validator(mode="after")
    def _a_file_has_extras(self) -> ModelConfig:
        if self.name_or_path.endswith(SINGLE_FILE) and self.extras_name_or_path is None:
            raise ValueError(
                "extras_name_or_path: required, because name_or_path is a single file; give the folder with its other components"
            )
        if not self.name_or_path.endswith(SINGLE_FILE) and self.extras_name_or_path is not None:
            raise ValueError(
                "extras_name_or_path: plays no part, because name_or_path is a folder with all components; remove it"
            )
        return self


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


AdapterFormat = Literal["diffusers", "peft", "comfyui", "kohya"]


class SaveConfig(Native):
    """Checkpoints and the final adapter."""

    dtype: Precision = Field(Precision.BF16, description="Number format of the exported adapter; checkpoints are fp32.")
    formats: tuple[AdapterFormat, ...] = Field(
        ("diffusers",),
        min_length=1,
        max_length=4,
        description="Layouts of the final adapter, each with the same effect: diffusers (adapter.safetensors), peft "
        "(peft/), comfyui (adapter.comfyui.safetensors), kohya (adapter.kohya.safetensors).",
    )
    weights_bin: bool = Field(False, description="Also write adapter_weights.bin, which torch.load reads.")
    save_every: int = Field(
        500, ge=1, le=10_000_000, description="Steps between checkpoints. May be changed while training."
    )
    max_step_saves: int = Field(
        4,
        ge=1,
        le=1000,
        description="How many checkpoints are kept; older ones are removed. May be changed while training.",
    )

    @model_validator(mode="after")
    def _formats_differ(self) -> SaveConfig:
        if len(set(self.formats)) < len(self.formats):
            raise ValueError("formats: names a format twice; name each once")
        return self


class SampleConfig(Native):
    """Pictures or clips drawn with the adapter."""

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
    num_frames: Frames = Field(1, description="Frames of each sample, 4k + 1, for families that make videos.")
    fps: int = Field(16, ge=1, le=240, description="Frames per second at which samples of several frames play.")


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
    def _whole_models_have_one_format(self) -> TrainerConfig:
        if self.network.type == "full" and set(self.save.formats) != {"diffusers"}:
            raise ValueError(
                "save.formats: network.type full ends in a whole denoiser, which has the format diffusers only"
            )
        return self

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
        why = "with train_text_encoder: true, diffusers loads only LoRA into text encoders"
        if self.network.type != "lora":
            raise ValueError(f"network.type: must be lora {why}")
        if any(rule.type not in (None, "lora") for rule in self.network.modules):
            raise ValueError(f"network.modules: the type of each rule must be lora {why}")
        if set(self.save.formats) != {"diffusers"}:
            raise ValueError(
                "save.formats: with train_text_encoder: true there is the format diffusers only, the others have no place "
                "for text encoders"
            )
        return self

    @model_validator(mode="after")
    def _two_experts_are_trained_with_fresh_adapters(self) -> TrainerConfig:
        if self.model.arch != Arch.WAN22:
            return self
        refused = {
            "network.type: full": self.network.type == "full",
            f"network.init_from: {self.network.init_from}": self.network.init_from is not None,
            "save.weights_bin: true": self.save.weights_bin,
            f"model.assistant_lora_path: {self.model.assistant_lora_path}": self.model.assistant_lora_path is not None,
        }
        for found, is_so in refused.items():
            if is_so:
                raise ValueError(f"{found} is not supported for model.arch wan22, which has two experts")
        return self

    @model_validator(mode="after")
    def _formats_are_known_for_the_family(self) -> TrainerConfig:
        if not knows_original_layers(self.model.arch) and not set(self.save.formats) <= {"diffusers", "peft"}:
            raise ValueError(
                f"save.formats: comfyui and kohya are not supported for model.arch {self.model.arch}, whose original layers "
                "are not known; leave diffusers and peft"
            )
        return self

    @model_validator(mode="after")
    def _assistants_need_additive_adapters(self) -> TrainerConfig:
        types = {self.network.type, *(rule.type for rule in self.network.modules if rule.type is not None)}
        if self.model.assistant_lora_path is not None and types & {"full", "dora"}:
            raise ValueError(
                "model.assistant_lora_path: can't be taken out again from under network.type full or dora, which do not "
                "only add to the weights; use lora, lokr or loha"
            )
        return self

    @model_validator(mode="after")
    def _clips_need_a_video_family(self) -> TrainerConfig:
        if self.model.arch in VIDEO_ARCHS:
            return self
        blocks = [*((f"datasets[{n}]", each.num_frames) for n, each in enumerate(self.datasets))]
        for name, frames in [*blocks, ("sample", self.sample.num_frames)]:
            if frames > 1:
                raise ValueError(
                    f"{name}.num_frames: {frames}, but model.arch {self.model.arch} knows pictures only; set it to 1"
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
