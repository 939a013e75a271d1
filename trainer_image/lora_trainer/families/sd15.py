"""Stable Diffusion 1.5, and 2.x models with the same pipeline.

- Text: the last hidden state of CLIP, always 77 tokens. Its layers can be trained (`train.train_text_encoder`).
- The rest as in `unet`.

References:
    diffusers 0.42: `pipelines/stable_diffusion/pipeline_stable_diffusion.py`,
    `examples/dreambooth/train_dreambooth_lora.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.folder import Layout, check_folder
from lora_trainer.families.unet import SIZE_MULTIPLE, UNetModel

LAYOUT = Layout(pipelines=("StableDiffusionPipeline",), weights=("unet", "vae", "text_encoder"))

UNUSED = ("safety_checker", "feature_extractor", "image_encoder")


class SD15Model(UNetModel):
    """A loaded Stable Diffusion 1.5."""

    trainable_text_parts = ("text_encoder",)

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self._embed_trained([caption]).items()}

    def _embed_trained(self, captions: list[str]) -> Conditioning:
        embeds_BLD, _ = self.pipe.encode_prompt(captions, self.device, 1, do_classifier_free_guidance=False)
        return {"embeds": embeds_BLD}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        if negative is None:
            options["guidance_scale"] = 1.0
        x_BChw: Tensor = self.pipe(
            prompt_embeds=embeds["embeds"], negative_prompt_embeds=negative and negative["embeds"], **options
        ).images
        return x_BChw


class SD15(Family):
    """Stable Diffusion 1.5."""

    arch = ("sd15",)
    size_multiple = SIZE_MULTIPLE

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> SD15Model:
        """See `Family.load`."""
        from diffusers import StableDiffusionPipeline

        check_folder(folder, self.name, LAYOUT)
        without = (*SD15Model.text_parts, *UNUSED)
        pipe = load_pipeline(
            StableDiffusionPipeline, folder, dtype=dtype, device=device, without=without, requires_safety_checker=False
        )
        return SD15Model(pipe, folder, dtype=dtype, device=device)
