"""Stable Diffusion XL.

- Text: the last but one hidden states of two CLIP encoders side by side, always 77 tokens, and the pooled output of the
  second. Both can be trained (`train.train_text_encoder`). An empty caption is all zeros where the model says
  `force_zeros_for_empty_prompt`: so it was trained, and so its pipeline draws without a negative prompt.
- Sizes: the UNet is also told the original size, the crop and the target size. Here they are (H, W), (0, 0), (H, W) of
  the trained picture: pictures are never enlarged, so the original is never smaller than what is seen, and these are
  the values that the pipeline draws with unless told otherwise.
- The rest as in `unet`.

References:
    Podell et al. 2023, "SDXL", section 2.2 (size and crop conditioning).
    diffusers 0.42: `pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py`,
    `examples/dreambooth/train_dreambooth_lora_sdxl.py`.
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

LAYOUT = Layout(
    pipelines=("StableDiffusionXLPipeline",),
    weights=("unet", "vae", "text_encoder", "text_encoder_2"),
    others=("tokenizer", "tokenizer_2", "scheduler"),
)


class SDXLModel(UNetModel):
    """A loaded SDXL."""

    text_parts = ("text_encoder", "text_encoder_2")
    trainable_text_parts = text_parts

    def text_targets(self, part: str) -> list[str]:
        """The attention projections; not those of the first encoder's last layer, whose output nobody reads."""
        targets = super().text_targets(part)
        if part != "text_encoder":
            return targets
        config: Any = self.text_encoder(part).config
        unread = f"encoder.layers.{config.num_hidden_layers - 1}."
        return [name for name in targets if unread not in name]

    def _added_conditions(self, x_t_BChw: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
        height, width = (side * self.pipe.vae_scale_factor for side in x_t_BChw.shape[-2:])
        sizes_6 = torch.tensor([height, width, 0, 0, height, width], dtype=self.dtype, device=self.device)
        return {"text_embeds": conditioning["pooled"], "time_ids": sizes_6.repeat(len(x_t_BChw), 1)}

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self._embed_trained([caption]).items()}

    def _embed_trained(self, captions: list[str]) -> Conditioning:
        embeds_BLD, _, pooled_BD, _ = self.pipe.encode_prompt(
            captions, device=self.device, do_classifier_free_guidance=False
        )
        if self.pipe.config.force_zeros_for_empty_prompt:
            kept_B = torch.tensor([bool(caption) for caption in captions], device=self.device)
            embeds_BLD, pooled_BD = embeds_BLD * kept_B[:, None, None], pooled_BD * kept_B[:, None]
        return {"embeds": embeds_BLD, "pooled": pooled_BD}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        if negative is None:
            options["guidance_scale"] = 1.0
        x_BChw: Tensor = self.pipe(
            prompt_embeds=embeds["embeds"],
            pooled_prompt_embeds=embeds["pooled"],
            negative_prompt_embeds=negative and negative["embeds"],
            negative_pooled_prompt_embeds=negative and negative["pooled"],
            **options,
        ).images
        return x_BChw


class SDXL(Family):
    """Stable Diffusion XL."""

    arch = ("sdxl",)
    size_multiple = SIZE_MULTIPLE

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> SDXLModel:
        """See `Family.load`."""
        from diffusers import StableDiffusionXLPipeline

        check_folder(folder, self.name, LAYOUT)
        without = (*SDXLModel.text_parts, "feature_extractor", "image_encoder")
        pipe = load_pipeline(
            StableDiffusionXLPipeline, folder, dtype=dtype, device=device, without=without, add_watermarker=False
        )
        return SDXLModel(pipe, folder, dtype=dtype, device=device)
