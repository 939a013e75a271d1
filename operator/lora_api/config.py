"""`spec.config`: the trainer's own configuration in its native snake_case keys.

The keys are the ones users of ai-toolkit already write; where that tool guesses, this one refuses.
`MUTABLE_CONFIG_PATHS` names what may change while a job runs; everything else defines the run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lora_api.archs import Arch, ArchName
from lora_api.base import Native
from lora_api.datasets import DatasetConfig, Frames
from lora_api.locations import Line, ModelLocation
from lora_api.network import NetworkConfig
from lora_api.rules import RULES
from lora_api.training import Precision, TrainConfig

SINGLE_FILE = ".safetensors"  # ending of a location that is one file


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

    quantize: Literal["int8", "fp8", "nf4"] | None = Field(
        None,
        description="Number format in which the linear layers of the denoiser's blocks are kept, with any adapter type: int8 "
        "or fp8 with a scale for each output, or nf4 with one for every 64 weights. Computed with in `train.dtype`. Left out: `train.dtype`.",
    )
    quantize_te: Literal["int8", "fp8", "nf4"] | None = Field(
        None, description="The same for the linear layers of text encoders. Changes the captions' embeddings a little."
    )

    offload_blocks: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the denoiser's blocks whose weights rest in CPU memory and visit the GPU when they are computed "
        "with; 1 is all. Needs that much more time for copying.",
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
    def _its_parts_fit_together(self) -> TrainerConfig:
        for rule in RULES:
            if problem := rule(self):
                raise ValueError(problem)
        return self


MUTABLE_CONFIG_PATHS: tuple[tuple[str, ...], ...] = (
    ("save",),
    ("sample",),
    ("train", "steps"),
    ("train", "lr"),
)
"""Paths below `spec.config` that may change while a job runs; taken over through `control.json`."""
