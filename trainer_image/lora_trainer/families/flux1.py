"""FLUX.1, dev and schnell.

- Latents: 16 channels at 1/8, (z - shift_factor) * scaling_factor.
- Text: the last hidden state of T5, padded to 512 tokens, without a mask; and the pooled output of CLIP, whose layers
  can be trained (`train.train_text_encoder`). T5 stays frozen, its states come from the cache.
- Denoiser: takes tokens of 2 x 2 latents with position ids, sigma itself as timestep, returns the velocity.
- Guidance: the dev model has the scale built in as an input. It is trained at 1, the value that names the data as they
  are; samples are drawn at `guidance_scale` (the pipeline's own default is 3.5), and negative prompts play no part.

Shapes as in `base`; S = h w / 4 image tokens.

References:
    diffusers 0.42: `pipelines/flux/pipeline_flux.py`, `examples/dreambooth/train_dreambooth_lora_flux.py`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flow import ShiftedLatentsModel
from lora_trainer.families.folder import Layout, check_folder
from lora_trainer.families.original import JOINT_ATTENTION, Original, renamed

LAYOUT = Layout(
    pipelines=("FluxPipeline",),
    weights=("transformer", "vae", "text_encoder", "text_encoder_2"),
    others=("tokenizer", "tokenizer_2", "scheduler"),
)

TRAINING_GUIDANCE = 1.0

DOUBLE: dict[str, str | tuple[str, int, int]] = {
    **JOINT_ATTENTION,
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
}
SINGLE: dict[str, str | tuple[str, int, int]] = {
    "attn.to_q": ("linear1", 0, 4),
    "attn.to_k": ("linear1", 1, 4),
    "attn.to_v": ("linear1", 2, 4),
    "proj_mlp": ("linear1", 3, 4),
    "proj_out": "linear2",
    "norm.linear": "modulation.lin",
}
"""Layers of both kinds of blocks in diffusers and in the original model."""


class Flux1Model(ShiftedLatentsModel):
    """A loaded FLUX.1."""

    text_parts = ("text_encoder", "text_encoder_2")
    trainable_text_parts = ("text_encoder",)

    def velocity(self, x_t_BChw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's output, unpacked; sigma is its timestep as it stands."""
        count, channels, height, width = x_t_BChw.shape
        pipe, embeds_BLD = self.pipe, conditioning["embeds"]
        guided = self.denoiser.config.guidance_embeds  # type: ignore[union-attr]
        ids_S3 = pipe._prepare_latent_image_ids(  # noqa: SLF001 positions of image tokens
            count, height // 2, width // 2, self.device, self.dtype
        )
        v_BSC = self.trainable_denoiser(
            hidden_states=pipe._pack_latents(x_t_BChw.to(self.dtype), *x_t_BChw.shape),  # noqa: SLF001 its token order
            timestep=sigma_B.to(self.device, self.dtype),
            guidance=torch.full((count,), TRAINING_GUIDANCE, device=self.device) if guided else None,
            pooled_projections=conditioning["pooled"],
            encoder_hidden_states=embeds_BLD,
            txt_ids=torch.zeros(embeds_BLD.shape[1], 3, device=self.device, dtype=self.dtype),
            img_ids=ids_S3,
            return_dict=False,
        )[0]
        v_BChw: Tensor = v_BSC.view(count, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return v_BChw.reshape(x_t_BChw.shape).float()

    def default_targets(self) -> list[str]:
        """Every linear layer of the double-stream and single-stream blocks."""
        blocks = ("transformer_blocks.", "single_transformer_blocks.")
        return [n for n, m in self.denoiser.named_modules() if isinstance(m, nn.Linear) and n.startswith(blocks)]

    def original_layer(self, layer: str) -> Original:
        """See `BaseModel.original_layer`."""
        if layer.startswith("single_"):
            return renamed(layer, {"single_transformer_blocks.": "single_blocks."}, SINGLE)
        return renamed(layer, {"transformer_blocks.": "double_blocks."}, DOUBLE)

    @cached_property
    def text_tokens(self) -> int:
        """Longest caption in tokens of T5."""
        return min(self.max_text_tokens, int(self.pipe.tokenizer_2.model_max_length))

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        embeds_BLD, pooled_BD, _ = self.pipe.encode_prompt(
            [caption], None, device=self.device, max_sequence_length=self.text_tokens
        )
        return {"embeds": embeds_BLD[0], "pooled": pooled_BD[0]}

    def _embed_trained(self, captions: list[str]) -> Conditioning:
        return {"pooled": self.pipe._get_clip_prompt_embeds(captions, device=self.device)}  # noqa: SLF001 CLIP alone

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:  # noqa: ARG002 guidance is built in
        x_BSC = self.pipe(prompt_embeds=embeds["embeds"], pooled_prompt_embeds=embeds["pooled"], **options).images
        x_BChw: Tensor = self.pipe._unpack_latents(  # noqa: SLF001 the pipeline's token order
            x_BSC, options["height"], options["width"], self.pipe.vae_scale_factor
        )
        return x_BChw


class Flux1(Family):
    """FLUX.1: the folder decides whether there is a guidance input."""

    arch = ("flux1",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> Flux1Model:
        """See `Family.load`."""
        from diffusers import FluxPipeline

        check_folder(folder, self.name, LAYOUT)
        without = (*Flux1Model.text_parts, "feature_extractor", "image_encoder")
        pipe = load_pipeline(FluxPipeline, folder, dtype=dtype, device=device, without=without)
        return Flux1Model(pipe, folder, dtype=dtype, device=device)
