"""Support for tests of FLUX.1, Stable Diffusion 1.5 and SDXL: drawing with their pipelines, adapters as after training."""

from __future__ import annotations

from typing import Any

import torch

CLASSIC = ("flux1", "sd15", "sdxl")
PROMPT = "a photo of a red cube, ünïcode"


def fresh_pipeline(folder) -> Any:
    """A pipeline that diffusers loads by itself."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def as_arguments(condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A condition of ours as the pipelines take it."""
    names = {"embeds": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    return {names[name]: tensor[None] for name, tensor in condition.items()}


def draw(pipe, **text) -> torch.Tensor:
    """The latents that a pipeline draws without guidance."""
    return pipe(
        **text, num_inference_steps=2, width=64, height=64, guidance_scale=1.0, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip


@torch.no_grad()
def answer(model, condition) -> torch.Tensor:
    """The model's prediction for two noisy pictures."""
    channels = model.pipe.vae.config.latent_channels
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(2, channels, 8, 8, generator=generator) for _ in range(2))
    corrupted = model.corrupt(x0, noise, torch.tensor([0.3, 0.8]))
    return model.predict(corrupted.x_t, corrupted.time, model.collate([condition] * 2))


def disturb(adapter, std: float = 0.15) -> None:
    """Gives every parameter a value, as training would."""
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


def assert_same_effect(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> None:
    """Two pictures are equal but for rounding, measured by what the adapter changed in them."""
    effect = (expected - base).abs().max()
    assert effect > 1e-3
    assert (found - expected).abs().max() < 2e-3 * effect
