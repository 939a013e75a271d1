"""Wan 2.1 and Wan 2.2, text to video; a picture is a clip of one frame.

- Latents: 16 channels at 1/8, standardised channel by channel with the VAE's `latents_mean` and `latents_std`. Time is
  folded by 4 after the first frame: 4k + 1 frames become k + 1.
- Text: the last hidden state of UMT5. What follows the caption is zeros up to 512 tokens, and is attended to.
- Denoiser: takes clips (B, C, f, h, w) and the time 1000 sigma, returns the velocity.
- Wan 2.2 has two experts of one shape: `transformer` where sigma is at least `boundary_ratio`, `transformer_2` below.
- Guidance in samples: the usual classifier-free scale; 1 is off.

Shapes as in `base`; f latent frames.

References:
    diffusers 0.42: `pipelines/wan/pipeline_wan.py`. Wan Team 2025, "Wan: Open and Advanced Large-Scale Video Generative
    Models", sections 4.1 (VAE) and 4.2 (denoiser).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from lora_trainer.families.base import Conditioning
from lora_trainer.families.family import Family, load_pipeline
from lora_trainer.families.flow import FlowModel
from lora_trainer.families.folder import Layout, ModelError, check_folder
from lora_trainer.families.original import Original, renamed

TIME_SCALE = 1000
STARTS = {"blocks.": "blocks."}
ENDS: Mapping[str, str | tuple[str, int, int]] = {
    f"{ours}.{name}": f"{theirs}.{short}"
    for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
    for name, short in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
} | {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
"""Names of the original layers, by ours."""

ONE = Layout(pipelines=("WanPipeline",))
TWO = Layout(pipelines=("WanPipeline",), weights=("transformer", "transformer_2", "vae", "text_encoder"))


class WanModel(FlowModel):
    """A loaded Wan with one denoiser."""

    makes_clips = True

    def normalise(self, z_BCfhw: Tensor) -> Tensor:
        """Standardises each channel."""
        mean, std = self._latent_statistics(z_BCfhw)
        return (z_BCfhw - mean) / std

    def denormalise(self, x_BCfhw: Tensor) -> Tensor:
        """The inverse."""
        mean, std = self._latent_statistics(x_BCfhw)
        return x_BCfhw * std + mean

    def _latent_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.pipe.vae.config
        mean, std = (
            like.new_tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
        )
        return mean, std

    def velocity(self, x_t_BCfhw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The denoiser's output at time 1000 sigma."""
        v_BCfhw = self.trainable_denoiser(
            hidden_states=x_t_BCfhw.to(self.dtype),
            timestep=sigma_B.to(self.device, torch.float32) * TIME_SCALE,
            encoder_hidden_states=conditioning["embeds"],
            return_dict=False,
        )[0]
        return v_BCfhw.float()  # type: ignore[no-any-return]

    @property
    def static_shift(self) -> float:
        """As `FlowModel.static_shift`; this scheduler calls its shift `flow_shift`."""
        config = self.pipe.scheduler.config
        return float(config.get("flow_shift") or config.get("shift") or 1.0)

    def collate(self, conditions: list[dict[str, Tensor]]) -> Conditioning:
        """`embeds` (B, L, D): each caption followed by zeros up to the full length, which is what the pipeline gives."""
        embeds_BLD = torch.zeros(len(conditions), self.text_tokens, conditions[0]["embeds"].shape[-1])
        for row, each in zip(embeds_BLD, conditions, strict=True):
            row[: len(each["embeds"])] = each["embeds"]
        return {"embeds": embeds_BLD.to(self.device, self.dtype)}

    def default_targets(self) -> list[str]:
        """Every linear layer of the blocks."""
        return [n for n, m in self.denoiser.named_modules() if isinstance(m, nn.Linear) and "blocks." in n]

    def original_layer(self, layer: str) -> Original:
        """See `BaseModel.original_layer`."""
        return renamed(layer, STARTS, ENDS)

    def _vae_pixels(self, pixels: Tensor) -> Tensor:
        return pixels if pixels.ndim == 5 else pixels.unsqueeze(2)

    def _embed_caption(self, caption: str) -> dict[str, Tensor]:
        embeds_1LD, _ = self.pipe.encode_prompt(
            [caption], do_classifier_free_guidance=False, max_sequence_length=self.text_tokens, device=self.device
        )
        length = int(embeds_1LD[0].ne(0).any(dim=-1).sum())  # zeros follow; they are not worth keeping
        return {"embeds": embeds_1LD[0, :length]}

    def _draw_latents(self, embeds: Conditioning, negative: Conditioning | None, **options: Any) -> Tensor:
        if negative is None:
            options["guidance_scale"] = 1.0
        x_BCfhw: Tensor = self.pipe(
            prompt_embeds=embeds["embeds"], negative_prompt_embeds=negative and negative["embeds"], **options
        ).frames
        return x_BCfhw

    def _frames(self, pixels_BCFHW: Tensor) -> list[Image.Image]:
        frames: list[Image.Image] = self.pipe.video_processor.postprocess_video(pixels_BCFHW, output_type="pil")[0]
        return frames


class Experts(nn.Module):
    """Both denoisers of Wan 2.2 as one: each sample is answered by the expert of its noise level.

    An expert that no sample of a batch belongs to takes part with a gradient of zero, which is its share of the mean
    loss: so the update is the same for one process and for many, and gradient averaging never waits for it.
    """

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low
        self.boundary = boundary

    def forward(self, *, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **options: Any) -> Any:
        """(velocity,), as each of the two returns it."""
        high_B = timestep >= self.boundary
        result: Tensor | None = None
        unused = hidden_states.new_zeros((), dtype=torch.float32)
        for expert, mine_B in ((self.transformer, high_B), (self.transformer_2, ~high_B)):
            if not mine_B.any():
                unused = unused + sum(p.float().sum() * 0 for p in expert.parameters() if p.requires_grad)
                continue
            part = expert(
                hidden_states=hidden_states[mine_B],
                timestep=timestep[mine_B],
                encoder_hidden_states=encoder_hidden_states[mine_B],
                **options,
            )[0]
            result = part.new_zeros(hidden_states.shape) if result is None else result
            result = result.index_put((mine_B.nonzero()[:, 0],), part)
        assert result is not None, "an empty batch"
        return (result + unused.to(result.dtype),)

    def enable_gradient_checkpointing(self, *call: Callable[..., Any]) -> None:
        """Of both."""
        for expert in (self.transformer, self.transformer_2):
            expert.enable_gradient_checkpointing(*call)  # type: ignore[operator]


class WanTwoExpertModel(WanModel):
    """A loaded Wan 2.2: adapters on both experts, each trained on its own noise levels."""

    export_parts: ClassVar[dict[str, str]] = {"_high_noise": "transformer", "_low_noise": "transformer_2"}

    def __init__(self, pipe: Any, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipe, folder, dtype=dtype, device=device)
        pipe.transformer_2.requires_grad_(requires_grad=False).eval()
        boundary = float(pipe.config.boundary_ratio) * TIME_SCALE
        self.denoiser = self.forward_module = Experts(pipe.transformer, pipe.transformer_2, boundary)


class Wan21(Family):
    """Wan 2.1, text to video."""

    arch = ("wan21",)
    frame_step = 4

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> WanModel:
        """See `Family.load`; refuses models with two experts, and those that start from a picture."""
        pipe = self._pipeline(folder, ONE, dtype, device)
        if pipe.transformer_2 is not None or pipe.config.boundary_ratio is not None:
            raise ModelError(f"model folder {folder}: found two experts, expected one; set model.arch to wan22")
        return WanModel(pipe, folder, dtype=dtype, device=device)

    def _pipeline(self, folder: Path, layout: Layout, dtype: torch.dtype, device: torch.device) -> Any:
        from diffusers import WanPipeline

        check_folder(folder, self.name, layout)
        pipe = load_pipeline(WanPipeline, folder, dtype=dtype, device=device)
        config = pipe.transformer.config
        if config.in_channels != pipe.vae.config.z_dim or pipe.config.expand_timesteps:
            raise ModelError(
                f"model folder {folder}: found a denoiser with {config.in_channels} input channels for {pipe.vae.config.z_dim} "
                f"latent channels{', one time for each token' if pipe.config.expand_timesteps else ''}; model.arch {self.name} "
                "expects a text-to-video model"
            )
        return pipe


class Wan22(Wan21):
    """Wan 2.2 A14B, text to video."""

    arch = ("wan22",)

    def load(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> WanTwoExpertModel:
        """See `Family.load`."""
        pipe = self._pipeline(folder, TWO, dtype, device)
        if not pipe.config.boundary_ratio:
            raise ModelError(
                f"model folder {folder}: model_index.json has no boundary_ratio, expected one for two experts"
            )
        return WanTwoExpertModel(pipe, folder, dtype=dtype, device=device)
