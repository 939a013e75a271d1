"""Tiny models of the Wan families, and what else has a VAE for videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lora_trainer.tiny.pretrain import synthetic_pictures
from lora_trainer.tiny.tokenizer import CORPUS
from lora_trainer.tiny.vae import LATENT_CHANNELS

TEXT_WIDTH = 32
TEXT_TOKENS = 64
BOUNDARY = 0.875


def build_wan(*, experts: int) -> Any:
    """A `WanPipeline` with one denoiser or two."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = build_t5_tokenizer(TEXT_TOKENS)
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=TEXT_WIDTH // 2,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    denoisers = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=64,
        )
        for _ in range(experts)
    ]
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(config).eval(),
        vae=build_video_vae(AutoencoderKLWan),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
        ),
        transformer=denoisers[0],
        transformer_2=denoisers[1] if experts == 2 else None,
        boundary_ratio=BOUNDARY if experts == 2 else None,
    )


def build_video_vae(cls: Any) -> Any:
    """A VAE for videos of `cls`, whose latents have unit variance over synthetic pictures; it shows no pictures."""
    vae = cls(
        base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    with torch.no_grad():
        pictures = synthetic_pictures(4, 64, torch.Generator().manual_seed(0)).unsqueeze(2)
        latents = vae.encode(pictures).latent_dist.mode()
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.clamp_min(1e-4).tolist())
    assert isinstance(vae, nn.Module)
    return vae


def build_t5_tokenizer(max_tokens: int) -> Any:
    """A `T5Tokenizer` of single characters and the words of the corpus."""
    from transformers import T5Tokenizer

    words = sorted(set(CORPUS.replace(",", " ").split()))
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary += [(chr(code), -9.0) for code in range(33, 127)]
    vocabulary += [("\u2581" + word, -4.0) for word in words if len(word) > 1]
    vocabulary += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return T5Tokenizer(vocab=vocabulary, model_max_length=max_tokens)
