"""Qwen-Image.

- Latents: a video VAE at one frame; 16 channels at 1/8, standardised channel by channel with the VAE's `latents_mean`
  and `latents_std`.
- Text: the last hidden state of Qwen2.5-VL without the 34 tokens of the instruction before the caption. Captions of one
  batch are padded with zeros, and a mask keeps the padding from being attended to.
- Denoiser: takes latents folded 2 x 2 into tokens and the size of the picture in them, sigma itself as time, returns the
  velocity.
- Guidance in samples: classifier-free, the result scaled back to the length of the conditional prediction; 1 is off.

Shapes as in `base`; S = h w / 4 image tokens.

References:
    diffusers 0.42: `pipelines/qwenimage/pipeline_qwenimage.py`, `examples/dreambooth/train_dreambooth_lora_qwen_image.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flow import FlowModel
from lora_trainer.families.folder import Layout, ModelError, check_folder

FEWEST_STEPS = 2  # this family's schedule ends above 0 and is stretched over the steps, which one step can't be
LAYOUT = Layout(pipelines=("QwenImagePipeline",))


class QwenImageModel(FlowModel):
    """A loaded Qwen-Image."""

    def normalise(self, z_BC1hw: Tensor) -> Tensor:
        """Standardises each channel and drops the time axis: (B, C, 1, h, w) to (B, C, h, w)."""
        mean, std = self._latent_statistics(z_BC1hw)
        return ((z_BC1hw - mean) / std).squeeze(2)

    def denormalise(self, x_BChw: Tensor) -> Tensor:
        """The inverse."""
        mean, std = self._latent_statistics(x_BChw)
        return x_BChw.unsqueeze(2) * std + mean

    def _latent_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.pipe.vae.config
        mean, std = (
            like.new_tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
        )
        return mean, std

    def velocity(self, x_t_BChw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's output, unfolded."""
        size, height, width = len(x_t_BChw), *x_t_BChw.shape[-2:]
        x_BSC = self.pipe._pack_latents(x_t_BChw.to(self.dtype), size, x_t_BChw.shape[1], height, width)  # noqa: SLF001 its token order
        v_BSC = self.trainable_denoiser(
            hidden_states=x_BSC,
            timestep=sigma_B.to(self.device, self.dtype),
            guidance=None,
            encoder_hidden_states=conditioning["embeds"],
            encoder_hidden_states_mask=conditioning["mask"],
            img_shapes=[[(1, height // 2, width // 2)]] * size,
            return_dict=False,
        )[0]
        return self._unfolded(v_BSC, height, width).float()

    def _unfolded(self, x_BSC: Tensor, height: int, width: int) -> Tensor:
        """(B, S, 4C) to (B, C, h, w), for latents of a height and width."""
        factor = self.pipe.vae_scale_factor
        x_BC1hw: Tensor = self.pipe._unpack_latents(x_BSC, height * factor, width * factor, factor)  # noqa: SLF001 as above
        return x_BC1hw.squeeze(2)

    def collate(self, conditions: list[dict[str, Tensor]]) -> Conditioning:
        """`embeds` (B, L, D) padded with zeros, `mask` (B, L), 1 for tokens of a caption, or None where all are."""
        captions = [each["embeds"] for each in conditions]
        lengths = torch.tensor([len(each) for each in captions])
        embeds_BLD = nn.utils.rnn.pad_sequence(captions, batch_first=True).to(self.device, self.dtype)
        mask_BL = (torch.arange(int(lengths.max())) < lengths[:, None]).long().to(self.device)
        return {"embeds": embeds_BLD, "mask": None if mask_BL.all() else mask_BL}

    def default_targets(self) -> list[str]:
        """Every linear layer of the blocks but two kinds.

        Left out are the modulations, which act on the time alone, and what the last block does to its text, which
        nobody reads.
        """
        last = f"transformer_blocks.{len(self.denoiser.transformer_blocks) - 1}."  # type: ignore[arg-type]
        unread = tuple(last + name for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp."))
        return [
            n
            for n, m in self.denoiser.named_modules()
            if isinstance(m, nn.Linear)
            and n.startswith("transformer_blocks.")
            and "_mod." not in n
            and not n.startswith(unread)
        ]

    def free_encoders(self) -> None:
        """See `BaseModel.free_encoders`; this VAE counts its encoder's layers before it decodes, so an empty one stays."""
        super().free_encoders()
        self.pipe.vae.encoder = nn.Module()

    def _vae_with_encoder(self) -> Any:
        if next(self.pipe.vae.encoder.parameters(), None) is None:
            self.pipe.vae.encoder = None
        return super()._vae_with_encoder()

    def _vae_pixels(self, pixels: Tensor) -> Tensor:
        return pixels.unsqueeze(2)

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        embeds_1LD, _ = self.pipe.encode_prompt([caption], device=self.device, max_sequence_length=self.text_tokens)
        return {"embeds": embeds_1LD[0]}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        guidance = options.pop("guidance_scale") if negative is not None else 1.0
        if guidance <= 1:
            negative = None
        for name, each in (("", embeds), ("negative_", negative)):
            if each is not None:
                options[f"{name}prompt_embeds"] = each["embeds"]
                options[f"{name}prompt_embeds_mask"] = torch.ones_like(each["embeds"][..., 0], dtype=torch.long)
        options.pop("guidance_scale", None)
        options["num_inference_steps"] = max(FEWEST_STEPS, options["num_inference_steps"])
        x_BSC = self.pipe(true_cfg_scale=guidance, **options).images
        factor = self.pipe.vae_scale_factor
        return self._unfolded(x_BSC, options["height"] // factor, options["width"] // factor)

    def _frames(self, pixels: Tensor) -> list[Any]:
        return super()._frames(pixels[:, :, 0])


class QwenImage(Family):
    """Qwen-Image, text to image."""

    arch = ("qwen_image",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> QwenImageModel:
        """See `Family.load`."""
        from diffusers import QwenImagePipeline

        check_folder(folder, self.name, LAYOUT)
        pipe = load_pipeline(QwenImagePipeline, folder, dtype=dtype, device=device)
        if pipe.transformer.config.guidance_embeds:
            raise ModelError(
                f"model folder {folder}: found a denoiser with guidance embedding, expected none ({self.name})"
            )
        return QwenImageModel(pipe, folder, dtype=dtype, device=device)
