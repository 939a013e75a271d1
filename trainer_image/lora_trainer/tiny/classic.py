"""Tiny models of the families that came before: FLUX.1, Stable Diffusion 1.5 and XL."""

from __future__ import annotations

from typing import Any

from lora_trainer.tiny.tokenizer import build_clip_tokenizer, build_t5_tokenizer
from lora_trainer.tiny.vae import build_vae

WIDTH = 32
SD_CHANNELS = 4
SD_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def _clip(tokenizer: Any, *, projection: bool = False, activation: str = "quick_gelu") -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=WIDTH,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def _t5(vocabulary: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=WIDTH // 2, d_ff=2 * WIDTH, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5EncoderModel(config).eval()


def flux1() -> Any:
    """FLUX.1, with the guidance input of the dev model."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    vae = build_vae(AutoencoderKL)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * vae.config.latent_channels,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=_clip(clip_tokenizer),
        tokenizer=clip_tokenizer,
        text_encoder_2=_t5(len(t5_tokenizer)),
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


def sd15() -> Any:
    """Stable Diffusion 1.5, without a safety checker."""
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    tokenizer = build_clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=SD_CHANNELS,
        out_channels=SD_CHANNELS,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    return StableDiffusionPipeline(
        vae=build_vae(AutoencoderKL, channels=SD_CHANNELS),
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=PNDMScheduler(skip_prk_steps=True, **SD_NOISE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    """SDXL."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    tokenizer, tokenizer_2 = build_clip_tokenizer(), build_clip_tokenizer(pad="!")
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=SD_CHANNELS,
        out_channels=SD_CHANNELS,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        cross_attention_dim=2 * WIDTH,
        norm_num_groups=4,
    )
    return StableDiffusionXLPipeline(
        vae=build_vae(AutoencoderKL, channels=SD_CHANNELS),
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer_2, projection=True, activation="gelu"),
        tokenizer_2=tokenizer_2,
        unet=unet,
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", **SD_NOISE),
        force_zeros_for_empty_prompt=True,
    )
