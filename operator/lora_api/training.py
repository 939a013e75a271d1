"""`spec.config.train`: the optimisation."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from lora_api.archs import TEXT_ENCODER_ARCHS
from lora_api.base import Native
from lora_api.optimization import Optimizer, OptimizerParams, SchedulerParams


class Precision(StrEnum):
    """A number format of tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


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
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "one_cycle", "rex"] = (
        Field("constant", description="Learning-rate schedule after warm-up.")
    )
    lr_scheduler_params: SchedulerParams = Field(SchedulerParams(), description="Shape of the schedule.")
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Steps over which the rate rises linearly from 0; for one_cycle, along a cosine from lr / 25.",
    )
    warmup_ratio: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="The same as a share of `steps`, in place of `warmup_steps`. one_cycle rises over 0.3 of the steps when "
        "neither is given.",
    )
    optimizer: Optimizer = Field("adamw", description="Optimizer.")
    optimizer_params: OptimizerParams = Field(
        OptimizerParams(), description="What only some optimizers have. What they share follows here."
    )
    weight_decay: float = Field(1e-4, ge=0, le=10, description="Decoupled weight decay, in proportion to the rate.")
    adam_beta1: float = Field(
        0.9, ge=0, lt=1, description="Beta 1 of AdamW and its relatives; lion and adafactor have none."
    )
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Beta 2 of the same.")
    adam_epsilon: float = Field(1e-8, gt=0, le=1, description="Epsilon of the same.")
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
