"""Flow matching: what FLUX, Z-Image and most newer families share.

x_t = (1 - sigma) x0 + sigma n with sigma in (0, 1), 1 being pure noise; the target is the velocity
d x_t / d sigma = n - x0.

References:
    Lipman et al. 2023, "Flow Matching for Generative Modeling", section 4 (the straight path).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from lora_trainer.families.base import BaseModel, Conditioning, Corrupted
from lora_trainer.families.noising import Prediction
from lora_trainer.objective import noisy


class FlowModel(BaseModel):
    """A base model that predicts velocities."""

    token_side: ClassVar[int] = 2
    """Latent pixels on the side of one token of the denoiser."""

    @abstractmethod
    def velocity(self, x_t_BChw: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """The model's velocity n - x0 at `x_t`, fp32, shaped like `x_t`.

        Args:
            x_t_BChw: Noisy normalised latents, any float format.
            sigma_B: Noise levels in (0, 1).
            conditioning: What `collate` returned, for B captions.
        """

    def corrupt(self, x0_BChw: Tensor, noise_BChw: Tensor, u_B: Tensor) -> Corrupted:
        """See `BaseModel.corrupt`; the time is sigma."""
        sigma_B = self.shift_sigma(u_B, x0_BChw.shape[1:])
        x_t_BChw, target_BChw = noisy(x0_BChw, noise_BChw, sigma_B)
        return Corrupted(x_t_BChw, sigma_B, target_BChw)

    def predict(self, x_t_BChw: Tensor, time_B: Tensor, conditioning: Conditioning) -> Tensor:
        """See `BaseModel.predict`."""
        return self.velocity(x_t_BChw, time_B, conditioning)

    def shift_sigma(self, u_B: Tensor, shape: Sequence[int] = ()) -> Tensor:
        """Noise levels that the family trains on, from `u_B` in (0, 1): sigma = k u / (1 + (k - 1) u).

        Args:
            u_B: As the density drew them.
            shape: Of the latents of a sample, for a shift by picture size.

        References:
            Esser et al. 2024, "Scaling Rectified Flow Transformers", equation 23.
        """
        k = self.shift_of(shape)
        return k * u_B / (1 + (k - 1) * u_B)

    def shift_of(self, shape: Sequence[int]) -> float:
        """K of `shift_sigma`: what the configuration chose, else the static shift of the model's own scheduler.

        Schedulers that shift by picture size do so when sampling only, unless `train.timestep_dynamic_shift` asks for it: for
        them k is 1, as in diffusers' training scripts.
        """
        if self.shifts_by_size:
            mu = self.sampling_mu(math.prod(shape[-2:]) // self.token_side**2)
            return mu if self.pipe.scheduler.config.get("time_shift_type") == "linear" else math.exp(mu)
        return self.static_shift if self.chosen_shift is None else self.chosen_shift

    @property
    def static_shift(self) -> float:
        """K that the model's scheduler has, whatever the size of the picture."""
        config = self.pipe.scheduler.config
        return 1.0 if config.get("use_dynamic_shifting") else float(config.get("shift") or 1.0)

    def sampling_mu(self, tokens: int) -> float:
        """Log k with which the pipeline samples a picture of so many tokens: a straight line through two points.

        References:
            diffusers 0.42, `calculate_shift` in `pipelines/flux/pipeline_flux.py`.
        """
        config = self.pipe.scheduler.config
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        return float(low + (high - low) / (many - few) * (tokens - few))

    def refuse_shift_by_size(self) -> str | None:
        """Why `shifts_by_size` can't be asked of this model."""
        if self.pipe.scheduler.config.get("use_dynamic_shifting"):
            return None
        return "the scheduler of this model does not shift by picture size (use_dynamic_shifting)"

    @property
    def prediction(self) -> Prediction:
        """The velocity."""
        return "velocity"

    def snr(self, time_B: Tensor) -> Tensor:
        """(1 - sigma)^2 / sigma^2."""
        return ((1 - time_B) / time_B).square()

    def noise_level(self, time_B: Tensor) -> Tensor:
        """Sigma itself."""
        return time_B


class ShiftedLatentsModel(FlowModel):
    """One whose VAE gives the constants by which latents are shifted and scaled."""

    def normalise(self, z_BChw: Tensor) -> Tensor:
        """Shifts and scales by the constants of the VAE's configuration."""
        config = self.pipe.vae.config
        return (z_BChw - config.shift_factor) * config.scaling_factor  # type: ignore[no-any-return]

    def denormalise(self, x_BChw: Tensor) -> Tensor:
        """The inverse."""
        config = self.pipe.vae.config
        return x_BChw / config.scaling_factor + config.shift_factor  # type: ignore[no-any-return]
