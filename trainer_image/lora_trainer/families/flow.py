"""Flow matching: what FLUX, Z-Image and most newer families share.

x_t = (1 - sigma) x0 + sigma n with sigma in (0, 1), 1 being pure noise; the target is the velocity
d x_t / d sigma = n - x0.

References:
    Lipman et al. 2023, "Flow Matching for Generative Modeling", section 4 (the straight path).
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lora_trainer.families.base import BaseModel, Conditioning, Corrupted
from lora_trainer.objective import noisy


class FlowModel(BaseModel):
    """A base model that predicts velocities."""

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
        sigma_B = self.shift_sigma(u_B)
        x_t_BChw, target_BChw = noisy(x0_BChw, noise_BChw, sigma_B)
        return Corrupted(x_t_BChw, sigma_B, target_BChw)

    def predict(self, x_t_BChw: Tensor, time_B: Tensor, conditioning: Conditioning) -> Tensor:
        """See `BaseModel.predict`."""
        return self.velocity(x_t_BChw, time_B, conditioning)

    def shift_sigma(self, u_B: Tensor) -> Tensor:
        """Noise levels that the family trains on, from uniform or logit-normal `u_B` in (0, 1).

        sigma = k u / (1 + (k - 1) u) with the static shift k of the model's own scheduler. Schedulers that shift by
        picture size do so when sampling only: for them k is 1, as in diffusers' training scripts.

        References:
            Esser et al. 2024, "Scaling Rectified Flow Transformers", equation 23.
        """
        config = self.pipe.scheduler.config
        k = 1.0 if config.get("use_dynamic_shifting") else float(config.get("shift") or 1.0)
        return k * u_B / (1 + (k - 1) * u_B)
