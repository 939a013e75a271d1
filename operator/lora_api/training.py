"""`spec.config.train`: the optimisation."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from lora_api.archs import TEXT_ENCODER_ARCHS
from lora_api.base import Native
from lora_api.optimization import EmaConfig, LrScheduler, Optimizer, OptimizerParams, SchedulerParams
from lora_api.order import MAX_STAGES, STEPS, StageConfig, total_steps
from lora_api.parallelism import Parallelism


class Precision(StrEnum):
    """A number format of tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class TrainPrecision(StrEnum):
    """What `train.dtype` may be."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    AUTO = "auto"


Density = Literal["logit_normal", "uniform", "mode", "cosmap"]
LossType = Literal["mse", "mae", "huber", "smooth_l1", "pseudo_huber"]

DELTA_LOSSES: tuple[LossType, ...] = ("huber", "smooth_l1", "pseudo_huber")
"""Losses that have a delta."""


class TrainConfig(Native):
    """The optimisation."""

    stages: tuple[StageConfig, ...] = Field(
        (),
        max_length=MAX_STAGES,
        description="Parts of the run with batches, rates or resolutions of their own, one after the other.",
    )
    steps: int = Field(
        default_factory=total_steps,  # no default for the API server to fill in
        ge=1,
        le=10_000_000,
        description="Optimizer steps in all. May be raised or lowered while training. Left out: the sum of the stages, or "
        f"{STEPS} where there are none.",
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
    lr_scheduler: LrScheduler = Field("constant", description="Learning-rate schedule after warm-up.")
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
    ema_config: EmaConfig = Field(EmaConfig(), description="Average of the weights.")
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
    gradient_checkpointing_every: int = Field(
        1,
        ge=1,
        le=1000,
        description="With `gradient_checkpointing`: only every n-th block is recomputed, which is faster and saves less.",
    )
    compile: bool = Field(
        False,
        description="Compile the denoiser's blocks one by one (torch.compile): slow first steps, faster ones after them. "
        "Compiled code is kept in the cache folder.",
    )
    dtype: TrainPrecision = Field(
        TrainPrecision.BF16,
        description="Number format of the base model and of the forward pass; adapters train in fp32. `auto`: bf16 where the "
        "GPU has it, fp16 with a scaled loss on older ones, fp32 on CPUs.",
    )
    timestep_type: Density | None = Field(
        None,
        description="Density of the noise levels, 0 picture to 1 noise, before the shift (Esser et al. 2024, section 3.1): "
        "logit_normal, uniform, mode (heavy tails) or cosmap. Left out: the family's own, logit_normal for flow matching, "
        "uniform for sd15 and sdxl.",
    )
    logit_mean: float = Field(
        0.0,
        ge=-10,
        le=10,
        description="Mean of the logit of the noise level, with logit_normal; above 0 is more noise.",
    )
    logit_std: float = Field(
        1.0, gt=0, le=10, description="Standard deviation of the logit of the noise level, with logit_normal."
    )
    mode_scale: float = Field(
        1.29,
        ge=-1,
        le=1.75,
        description="Scale s of the density mode: above 0 favours the middle, below 0 the ends.",
    )
    content_or_style: Literal["balanced", "content", "style"] = Field(
        "balanced",
        description="Bias of the noise levels: content draws more of the noisy ones, style more of the clear ones, by the "
        "cube of where on the density they lie.",
    )
    timestep_shift: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Static shift k of the noise levels, k u / (1 + (k - 1) u), for flow matching; 1 is none. Left out: that "
        "of the model's scheduler, none where it shifts by picture size.",
    )
    timestep_dynamic_shift: bool = Field(
        False,
        description="Shift the noise levels by picture size, as the model is sampled: flux1, flux2_* and qwen_image.",
    )
    min_timestep: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Lowest noise level that is trained, of 1000: after the shift, the density cut off.",
    )
    max_timestep: float = Field(1000.0, ge=0, le=1000, description="Highest noise level that is trained, of 1000.")
    loss_type: LossType = Field(
        "mse",
        description="Loss of each latent value: mse, mae, huber (Huber 1964), smooth_l1 (huber divided by its delta) or "
        "pseudo_huber, sqrt(d^2 + delta^2) - delta (Charbonnier et al. 1997).",
    )
    huber_delta: float = Field(
        0.1, gt=0, le=100, description="Where huber, smooth_l1 and pseudo_huber pass from square to straight."
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "constant",
        description="How huber_delta depends on the noise level (Khrapov et al. 2024): exponential goes from 1 without noise "
        "to huber_delta in pure noise, snr does so by the signal-to-noise ratio. Both need a huber_delta of at most 1.",
    )
    min_snr_gamma: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Weighs each sample by min(SNR, this) in terms of the picture (Hang et al. 2023); 5 is common. Left out: "
        "all samples weigh the same.",
    )
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none",
        description="Weighs each sample by its noise level, for flow matching: sigma_sqrt 1 / sigma^2, cosmap "
        "2 / (pi (1 - 2 sigma + 2 sigma^2)) (Esser et al. 2024).",
    )
    noise_offset: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Adds so much noise that is constant over each channel of a sample (Guttenberg 2023); 0.05 is common.",
    )
    input_perturbation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Adds so much noise to what the model is shown, but not to its target (Ning et al. 2023); 0.1 is common.",
    )
    reg_weight: float = Field(
        1.0, ge=0, le=1000, description="Weight of the loss of regularisation sets (`datasets[].is_reg`)."
    )
    parallelism: Parallelism = Field(
        "auto",
        description="How several processes share the work. `ddp`: a copy of the model on each. `fsdp`: its weights lie in "
        "shares on all of them, for bases that one GPU can't hold. `auto`: fsdp with `network.type: full`, else ddp. Which "
        "samples are trained does not depend on it; one process ignores it.",
    )
    max_nonfinite_steps: int = Field(
        10, ge=1, le=10000, description="Steps in a row whose loss is not finite before the run stops."
    )
    seed: int = Field(42, ge=0, le=2**31 - 1, description="Seed of noise, noise levels, order and dropout.")
