"""AuraFlow as a family of its own package: `model.arch: x-auraflow`. See docs/adding-a-model.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flow import FlowModel
from lora_trainer.families.folder import Layout, check_folder


class AuraFlowModel(FlowModel):
    """A loaded AuraFlow: flow matching, 4 latent channels at 1/8, captions from one T5."""

    max_text_tokens = 256

    def normalise(self, z_BChw: Tensor) -> Tensor:
        """Latents as the denoiser knows them."""
        return z_BChw * self.pipe.vae.config.scaling_factor

    def denormalise(self, x_BChw: Tensor) -> Tensor:
        """The inverse."""
        return x_BChw / self.pipe.vae.config.scaling_factor

    def velocity(self, x_t_BChw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's output as it stands; sigma is its timestep."""
        v_BChw = self.trainable_denoiser(
            x_t_BChw.to(self.dtype),
            encoder_hidden_states=conditioning["embeds"],
            timestep=sigma_B.to(self.device, self.dtype),
            return_dict=False,
        )[0]
        return v_BChw.float()

    def default_targets(self) -> list[str]:
        """Every linear layer of the transformer blocks."""
        blocks = ("joint_transformer_blocks.", "single_transformer_blocks.")
        return [n for n, m in self.denoiser.named_modules() if isinstance(m, nn.Linear) and n.startswith(blocks)]

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        embeds_BLD, mask_BL, *_ = self.pipe.encode_prompt(
            [caption],
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.text_tokens,
        )
        return {"embeds": embeds_BLD[0], "mask": mask_BL[0]}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        if negative is None:
            options["guidance_scale"] = 1.0
        return self.pipe(
            prompt_embeds=embeds["embeds"],
            prompt_attention_mask=embeds["mask"],
            negative_prompt_embeds=negative and negative["embeds"],
            negative_prompt_attention_mask=negative and negative["mask"],
            **options,
        ).images


class AuraFlow(Family):
    """AuraFlow."""

    arch = ("x-auraflow",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> AuraFlowModel:
        """See `Family.load`."""
        from diffusers import AuraFlowPipeline

        check_folder(folder, self.name, Layout(pipelines=("AuraFlowPipeline",)))
        pipe = load_pipeline(AuraFlowPipeline, folder, dtype=dtype, device=device)
        return AuraFlowModel(pipe, folder, dtype=dtype, device=device)
