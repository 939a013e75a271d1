"""Builds tiny pipelines: the real classes, conventions and file layout, with weights of a few megabytes.

What is kept from the real models: pipeline, denoiser, VAE, text-encoder and scheduler classes, the VAE's factor of 8,
the way latents are normalised, and the scheduler's settings. The denoiser is at least as wide as its patches (16
channels x 2 x 2 = 64): a narrower one can't even pass the noise through.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_trainer.families.folder import hide_progress_bars
from lora_trainer.tiny import classic
from lora_trainer.tiny.large_text import build_flux2_dev, build_qwen_image
from lora_trainer.tiny.tokenizer import build_tokenizer
from lora_trainer.tiny.vae import LATENT_CHANNELS, build_vae
from lora_trainer.tiny.wan import build_wan

KLEIN_TEXT_LAYERS = 28  # the pipeline reads hidden states 9, 18 and 27


def make_tiny(arch: str, out: Path, seed: int = 0) -> Path:
    """Writes the tiny model of a family as a folder of a diffusers pipeline.

    The same `arch` and `seed` give the same weights. Nothing is downloaded.

    Args:
        arch: A value of `model.arch`; `BUILDERS` has them all.
        out: The folder to write; it appears complete or not at all. One that holds a model already is left as it is.
        seed: Of the random weights.

    Returns:
        `out`.

    Raises:
        ValueError: There is no tiny model of this `arch`, or `out` holds something else.
    """
    if arch not in BUILDERS:
        raise ValueError(f"no tiny model of {arch!r}; there are {', '.join(sorted(BUILDERS))}")
    if (out / "model_index.json").is_file():
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is no model folder; give a new or empty folder")
    hide_progress_bars()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        pipe = BUILDERS[arch]()
        _fill_uninitialised(pipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        complete = Path(scratch) / "model"
        pipe.save_pretrained(complete, safe_serialization=True)
        for path in (complete, *complete.rglob("*")):  # another user may train on it
            path.chmod(0o755 if path.is_dir() else 0o644)
        if out.is_dir():
            out.rmdir()
        complete.replace(out)
    return out


def _fill_uninitialised(pipe: Any) -> None:
    """Gives values to what constructors leave empty or at zero (padding tokens), so that it takes part."""
    for component in pipe.components.values():
        if not isinstance(component, nn.Module):
            continue
        for name, parameter in component.named_parameters():
            if "pad_token" in name or not torch.isfinite(parameter).all():
                nn.init.normal_(parameter, 0, 0.02)


def _text_encoder(cls: Any, vocabulary: int, *, width: int, layers: int) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return cls(config).eval()


def _flux2_klein() -> Any:
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3ForCausalLM

    tokenizer, width = build_tokenizer(), 16
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=3 * width,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, time_shift_type="exponential"
    )
    return Flux2KleinPipeline(
        scheduler=scheduler,
        vae=build_vae(AutoencoderKLFlux2),
        text_encoder=_text_encoder(Qwen3ForCausalLM, len(tokenizer), width=width, layers=KLEIN_TEXT_LAYERS),
        tokenizer=tokenizer,
        transformer=transformer,
        is_distilled=False,
    )


def _zimage() -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Model

    tokenizer, width = build_tokenizer(), 32
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=width,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 64, 64],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(AutoencoderKL),
        text_encoder=_text_encoder(Qwen3Model, len(tokenizer), width=width, layers=3),
        tokenizer=tokenizer,
        transformer=transformer,
    )


BUILDERS: dict[str, Callable[[], Any]] = {
    "flux1": classic.flux1,
    "flux2_klein_4b": _flux2_klein,
    "flux2_klein_9b": _flux2_klein,
    "sd15": classic.sd15,
    "sdxl": classic.sdxl,
    "zimage": _zimage,
    "zimage:turbo": _zimage,
    "qwen_image": build_qwen_image,
    "flux2_dev": build_flux2_dev,
    "wan21": partial(build_wan, experts=1),
    "wan22": partial(build_wan, experts=2),
}
