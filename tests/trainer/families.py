"""Support for tests of families: what a diffusers pipeline shows while it draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PROMPT = "a photo of a red cube, ünïcode 漢字"


@dataclass
class Recording:
    """Each model output with the latents and the time it was for, the last latents, and what the VAE got.

    Attributes:
        steps: (output, latents, sigma), in the shape of the family's latents.
        last: The denoised latents.
        decoded: What the VAE's decoder got.
        options: How the pipeline was called, but for the prompt.
    """

    steps: list[tuple[torch.Tensor, torch.Tensor, float]]
    last: torch.Tensor
    decoded: torch.Tensor


def load_pipe(folder) -> Any:
    """A pipeline that diffusers loads by itself."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def record(pipe, monkeypatch, spatial: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Recording:
    """Draws with the prompt and writes down what passes by.

    Args:
        pipe: The pipeline.
        monkeypatch: Of the test.
        spatial: From the pipeline's latents to the family's.
        options: For the call.
    """
    steps, seen = [], {}
    step, decode = pipe.scheduler.step, pipe.vae.decode

    def recorded_step(output, t, x, *args, **kwargs):
        result = step(output, t, x, *args, **kwargs)
        steps.append((spatial(output).clone(), spatial(x).clone(), float(t) / 1000))
        seen["last"] = spatial(result[0]).clone()
        return result

    def recorded_decode(z, *args, **kwargs):
        seen["z"] = z.clone()
        return decode(z, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(pipe.scheduler, "step", recorded_step)
        patch.setattr(pipe.vae, "decode", recorded_decode)
        pipe(prompt=PROMPT, generator=torch.Generator().manual_seed(0), **options)
    return Recording(steps, seen["last"], seen["z"])


@torch.no_grad()
def velocity_errors(model, recording: Recording, *, sign: float = 1, flip_time: bool = False) -> list[float]:
    """Relative differences between our velocity and what the pipeline handed to its scheduler, step by step."""
    conditioning = model.collate([model.encode_text(PROMPT)])
    errors = []
    for output, x, sigma in recording.steps:
        v = sign * model.velocity(x, torch.tensor([1 - sigma if flip_time else sigma]), conditioning)
        errors.append(((v - output).abs().max() / output.abs().max()).item())
    return errors


def latent_error(model, recording: Recording, scale: float = 1.0) -> float:
    """Relative difference between normalising what the VAE was given and the latents it was given for."""
    ours = model.normalise(recording.decoded * scale)
    return ((ours - recording.last).abs().max() / recording.last.abs().max()).item()
