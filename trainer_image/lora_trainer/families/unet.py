"""DDPM with a UNet: what Stable Diffusion 1.5 and SDXL share.

x_t = sqrt(a_t) x0 + sqrt(1 - a_t) n at whole steps t of the model's own noise schedule, a_t being its cumulative alpha.
The target is the noise n (`epsilon`), or v = sqrt(a_t) n - sqrt(1 - a_t) x0 (`v_prediction`), as the model's scheduler
says. Steps are uniform unless the configuration chooses otherwise.

- Latents: the VAE's channels at 1/8, times scaling_factor.
- Layers: the linear ones of all attention blocks; with `network.conv` also the convolutions of residual blocks, of
  resizing, and the 1 x 1 projections around attention where a model has them.
- Guidance in samples: the usual classifier-free scale; 1 is off.

References:
    Ho et al. 2020, "Denoising Diffusion Probabilistic Models", equations 4 and 14; Salimans & Ho 2022, "Progressive
    Distillation", appendix D (v). Checked in tests/trainer/test_wiring_classic.py.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lora_trainer.families.base import BaseModel, Conditioning, Corrupted
from lora_trainer.families.folder import ModelError
from lora_trainer.families.noising import Prediction

SIZE_MULTIPLE = 64
"""The UNet halves the latents three times; released models were trained at multiples of 64 pixels."""

PREDICTIONS = ("epsilon", "v_prediction")

CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "proj_in", "proj_out")


class UNetModel(BaseModel):
    """A loaded base model with a UNet that predicts noise or v."""

    export_parts: ClassVar[dict[str, str]] = {"": "unet"}
    density = "uniform"

    def __init__(self, pipe: Any, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipe, folder, dtype=dtype, device=device)
        if self.noise_schedule.config.prediction_type not in PREDICTIONS:
            raise ModelError(
                f"model folder {folder / 'scheduler'}: found prediction_type "
                f"{self.noise_schedule.config.prediction_type}, expected {' or '.join(PREDICTIONS)}"
            )
        channels, latent = pipe.unet.config.in_channels, pipe.vae.config.latent_channels
        if channels != latent:
            raise ModelError(
                f"model folder {folder}: found a UNet with {channels} input channels, expected the VAE's {latent}; "
                "inpainting and editing models can't be trained"
            )

    @cached_property
    def noise_schedule(self) -> Any:
        """The schedule that the model was trained on; the pipeline's scheduler is for drawing and never touched."""
        from diffusers import DDPMScheduler

        return DDPMScheduler.from_config(self.pipe.scheduler.config)

    def normalise(self, z_BChw: Tensor) -> Tensor:
        """Scales by the constant of the VAE's configuration."""
        return z_BChw * self.pipe.vae.config.scaling_factor  # type: ignore[no-any-return]

    def denormalise(self, x_BChw: Tensor) -> Tensor:
        """The inverse."""
        return x_BChw / self.pipe.vae.config.scaling_factor  # type: ignore[no-any-return]

    def corrupt(self, x0_BChw: Tensor, noise_BChw: Tensor, u_B: Tensor) -> Corrupted:
        """See `BaseModel.corrupt`; the time is a whole step."""
        schedule = self.noise_schedule
        steps = schedule.config.num_train_timesteps
        time_B = (u_B * steps).long().clamp(0, steps - 1)
        target_BChw = noise_BChw
        if schedule.config.prediction_type == "v_prediction":
            target_BChw = schedule.get_velocity(x0_BChw, noise_BChw, time_B)
        return Corrupted(schedule.add_noise(x0_BChw, noise_BChw, time_B), time_B, target_BChw)

    @property
    def prediction(self) -> Prediction:
        """As the model's scheduler says."""
        kind: Prediction = self.noise_schedule.config.prediction_type
        return kind

    def snr(self, time_B: Tensor) -> Tensor:
        """a_t / (1 - a_t)."""
        a_B = self.noise_schedule.alphas_cumprod[time_B]
        return a_B / (1 - a_B)  # type: ignore[no-any-return]

    def noise_level(self, time_B: Tensor) -> Tensor:
        """T over the number of steps."""
        return time_B / self.noise_schedule.config.num_train_timesteps  # type: ignore[no-any-return]

    def predict(self, x_t_BChw: Tensor, time_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The UNet's output as it stands."""
        output_BChw: Tensor = self.trainable_denoiser(
            x_t_BChw.to(self.dtype),
            time_B.to(self.device),
            encoder_hidden_states=conditioning["embeds"],
            added_cond_kwargs=self._added_conditions(x_t_BChw, conditioning),
            return_dict=False,
        )[0]
        return output_BChw.float()

    def _added_conditions(self, x_t_BChw: Tensor, conditioning: Conditioning) -> dict[str, Tensor] | None:  # noqa: ARG002 SDXL uses them
        """What the UNet is told beside the text."""
        return None

    def default_targets(self) -> list[str]:
        """Linear layers of attention blocks, and convolutions of every block."""
        return [
            name
            for name, module in self.denoiser.named_modules()
            if (isinstance(module, nn.Linear) and ".attentions." in name)
            or (isinstance(module, nn.Conv2d) and name.endswith(CONVOLUTIONS))
        ]
