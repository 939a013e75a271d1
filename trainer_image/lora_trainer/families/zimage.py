"""Z-Image, and its distilled form Turbo, which is trained with a training adapter in its weights.

- Latents: 16 channels at 1/8, (z - shift_factor) * scaling_factor.
- Text: the last but one hidden state of Qwen3, padding removed: captions keep their own lengths.
- Denoiser: takes a list of pictures (C, 1, h, w) and a list of captions, the time 1 - sigma, and returns the negative
  velocity.
- Guidance in samples: the pipeline's own convention, prediction = cond + g (cond - uncond): 0 is off, and g here is the
  usual classifier-free scale less 1. Turbo is drawn without: guidance is distilled into its weights.

Shapes as in `base`.

References:
    diffusers 0.42: `pipelines/z_image/pipeline_z_image.py`, `examples/dreambooth/train_dreambooth_lora_z_image.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flow import ShiftedLatentsModel
from lora_trainer.families.folder import Layout, check_folder
from lora_trainer.families.original import Original, renamed

LAYOUT = Layout(pipelines=("ZImagePipeline",))

STARTS = {name: name for name in ("layers.", "noise_refiner.", "context_refiner.")}
ENDS: dict[str, str | tuple[str, int, int]] = {
    "attention.to_q": ("attention.qkv", 0, 3),
    "attention.to_k": ("attention.qkv", 1, 3),
    "attention.to_v": ("attention.qkv", 2, 3),
    "attention.to_out.0": "attention.out",
}
"""Layers of the blocks whose names differ in diffusers and in the original model."""


class ZImageModel(ShiftedLatentsModel):
    """A loaded Z-Image."""

    def velocity(self, x_t_BChw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Minus the denoiser's output at time 1 - sigma: the model points from noise to picture."""
        pictures = list(x_t_BChw.to(self.dtype).unsqueeze(2).unbind(0))
        time_B = 1 - sigma_B.to(self.device, torch.float32)
        outputs = self.trainable_denoiser(pictures, time_B, conditioning["embeds"], return_dict=False)[0]
        return -torch.stack(list(outputs)).squeeze(2).float()

    def collate(self, conditions: list[dict[str, Tensor]]) -> Conditioning:
        """`embeds`: a list of (L_i, D), each caption at its own length."""
        return {"embeds": [each["embeds"].to(self.device, self.dtype) for each in conditions]}

    def default_targets(self) -> list[str]:
        """Every linear layer of the main blocks; the refiners before them stay as they are."""
        return [n for n, m in self.denoiser.named_modules() if isinstance(m, nn.Linear) and n.startswith("layers.")]

    def original_layer(self, layer: str) -> Original:
        """See `BaseModel.original_layer`."""
        return renamed(layer, STARTS, ENDS)

    def comfyui_layer(self, layer: str) -> Original:
        """ComfyUI takes this family's split layers under their diffusers names, and so does diffusers."""
        return Original(layer)

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        # the pipeline writes into the list it is given: it gets one of its own
        embeds, _ = self.pipe.encode_prompt(
            [caption], device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        return {"embeds": embeds[0]}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        if negative is None:
            options["guidance_scale"] = 0.0
        x_BChw: Tensor = self.pipe(
            prompt_embeds=embeds["embeds"], negative_prompt_embeds=negative and negative["embeds"], **options
        ).images
        return x_BChw


class ZImage(Family):
    """Z-Image."""

    arch = ("zimage",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> ZImageModel:
        """See `Family.load`."""
        from diffusers import ZImagePipeline

        check_folder(folder, self.name, LAYOUT)
        return ZImageModel(
            load_pipeline(ZImagePipeline, folder, dtype=dtype, device=device), folder, dtype=dtype, device=device
        )


class ZImageTurboModel(ZImageModel):
    """A loaded Z-Image-Turbo."""

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        del negative  # guidance is distilled into the weights
        return super()._draw_latents(embeds, None, **options)


class ZImageTurbo(Family):
    """Z-Image-Turbo."""

    arch = ("zimage:turbo",)
    distilled_advice = (
        "set model.assistant_lora_path to a training adapter, such as hf://ostris/zimage_turbo_training_adapter/"
        "zimage_turbo_training_adapter_v2.safetensors, or train Tongyi-MAI/Z-Image with model.arch zimage"
    )

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> ZImageTurboModel:
        """See `Family.load`."""
        from diffusers import ZImagePipeline

        check_folder(folder, self.name, LAYOUT)
        return ZImageTurboModel(
            load_pipeline(ZImagePipeline, folder, dtype=dtype, device=device), folder, dtype=dtype, device=device
        )
