"""FLUX.2 Klein, 4B and 9B.

- Latents: the VAE's 32 channels at 1/8, folded 2 x 2 into 128 at 1/16, then standardised with the batch-norm
  statistics that the VAE carries.
- Text: three hidden states of Qwen3 (layers 9, 18, 27) side by side, always padded to 512 tokens. Padding is attended
  to: no mask reaches the denoiser, so it can't be cut away.
- Denoiser: takes packed tokens with position ids, sigma itself as timestep, returns the velocity.
- Guidance in samples: the usual classifier-free scale; 1 is off. Distilled models ignore it.

Shapes as in `base`; S = h w image tokens.

References:
    diffusers 0.42: `pipelines/flux2/pipeline_flux2_klein.py`, `examples/dreambooth/train_dreambooth_lora_flux2_klein.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.families.base import BaseModel, Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flow import FlowModel
from lora_trainer.families.folder import Layout, ModelError, check_folder
from lora_trainer.families.original import JOINT_ATTENTION, Original, renamed

LAYOUT = Layout(pipelines=("Flux2KleinPipeline",))

SAMPLING_STEPS = 50

TEXT_WIDTH = {"flux2_klein_4b": 3 * 2560, "flux2_klein_9b": 3 * 4096}
"""Width of the text input of the released models: three layers of Qwen3-4B and of Qwen3-8B."""

STARTS = {"transformer_blocks.": "double_blocks.", "single_transformer_blocks.": "single_blocks."}
ENDS: dict[str, str | tuple[str, int, int]] = {
    **JOINT_ATTENTION,
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
}
"""Layers of the blocks in diffusers and in the original model, whose attention has one layer for q, k and v."""


class Flux2KleinModel(FlowModel):
    """A loaded FLUX.2 Klein."""

    token_side = 1

    def normalise(self, z_BChw: Tensor) -> Tensor:
        """Folds 2 x 2 pixels into channels and standardises: (B, C, h, w) to (B, 4C, h/2, w/2)."""
        x_BChw: Tensor = self.pipe._patchify_latents(z_BChw)  # noqa: SLF001 the pipeline's own folding order
        mean, std = self._latent_statistics()
        return (x_BChw - mean) / std

    def denormalise(self, x_BChw: Tensor) -> Tensor:
        """The inverse: (B, 4C, h/2, w/2) to (B, C, h, w)."""
        mean, std = self._latent_statistics()
        z_BChw: Tensor = self.pipe._unpatchify_latents(x_BChw * std + mean)  # noqa: SLF001 as above
        return z_BChw

    def _latent_statistics(self) -> tuple[Tensor, Tensor]:
        vae = self.pipe.vae
        mean = vae.bn.running_mean.view(1, -1, 1, 1)
        std = (vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()
        return mean, std

    def sampling_mu(self, tokens: int) -> float:
        """As the pipeline fits it to picture size and steps; the steps are those that it takes unless told otherwise."""
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return compute_empirical_mu(image_seq_len=tokens, num_steps=SAMPLING_STEPS)  # type: ignore[no-any-return]

    def velocity(self, x_t_BChw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's output, unpacked; sigma is its timestep as it stands."""
        embeds_BLD = conditioning["embeds"]
        x_BSC = self.pipe._pack_latents(x_t_BChw.to(self.dtype))  # noqa: SLF001 the pipeline's token order
        v_BSC = self.trainable_denoiser(
            hidden_states=x_BSC,
            timestep=sigma_B.to(self.device, self.dtype),
            guidance=self._guidance(len(x_t_BChw)),
            encoder_hidden_states=embeds_BLD,
            txt_ids=self.pipe._prepare_text_ids(embeds_BLD).to(self.device),  # noqa: SLF001 positions of text tokens
            img_ids=self.pipe._prepare_latent_ids(x_t_BChw).to(self.device),  # noqa: SLF001 positions of image tokens
            return_dict=False,
        )[0]
        return v_BSC.permute(0, 2, 1).reshape(x_t_BChw.shape).float()  # type: ignore[no-any-return]

    def _guidance(self, count: int) -> Tensor | None:
        """(B,) guidance scales, for denoisers that have an embedding of it; Klein has none."""
        del count
        return None

    def collate(self, conditions: list[dict[str, Tensor]]) -> Conditioning:
        """`embeds` (B, L, D): every caption has the same padded length."""
        return {"embeds": torch.stack([each["embeds"] for each in conditions]).to(self.device, self.dtype)}

    def default_targets(self) -> list[str]:
        """Every linear layer of the double-stream and single-stream blocks."""
        blocks = ("transformer_blocks.", "single_transformer_blocks.")
        return [n for n, m in self.denoiser.named_modules() if isinstance(m, nn.Linear) and n.startswith(blocks)]

    def original_layer(self, layer: str) -> Original:
        """See `BaseModel.original_layer`."""
        return renamed(layer, STARTS, ENDS)

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        embeds_BLD, _ = self.pipe.encode_prompt([caption], device=self.device, max_sequence_length=self.text_tokens)
        return {"embeds": embeds_BLD[0]}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        if negative is None:
            options["guidance_scale"] = 1.0
        z_BChw = self.pipe(
            prompt_embeds=embeds["embeds"], negative_prompt_embeds=negative and negative["embeds"], **options
        ).images
        return self.normalise(z_BChw.float())  # this pipeline hands out latents ready for the VAE


class Flux2Klein(Family):
    """FLUX.2 Klein, both sizes: the folder decides all dimensions."""

    arch = ("flux2_klein_4b", "flux2_klein_9b")

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> Flux2KleinModel:
        """See `Family.load`; also refuses the released model of the other size, whose memory needs differ."""
        from diffusers import Flux2KleinPipeline

        check_folder(folder, self.name, LAYOUT)
        pipe = load_pipeline(Flux2KleinPipeline, folder, dtype=dtype, device=device)
        width = pipe.transformer.config.joint_attention_dim
        other = next(
            (arch for arch, other_width in TEXT_WIDTH.items() if arch != self.name and other_width == width), None
        )
        if other is not None:
            raise ModelError(
                f"model folder {folder}: found text width {width}, that of {other}, but model.arch {self.name} expects "
                f"{TEXT_WIDTH[self.name]}; set model.arch to {other}"
            )
        if pipe.transformer.config.guidance_embeds:
            raise ModelError(
                f"model folder {folder}: found a denoiser with guidance embedding, expected none ({self.name})"
            )
        return Flux2KleinModel(pipe, folder, dtype=dtype, device=device)

    def distilled(self, model: BaseModel) -> str | None:
        """See `Family.distilled`; the model's index tells."""
        if not model.pipe.config.get("is_distilled"):
            return None
        size = self.name.rpartition("_")[2].upper()
        return f"train the undistilled model, black-forest-labs/FLUX.2-klein-base-{size}; the adapter works on both"
