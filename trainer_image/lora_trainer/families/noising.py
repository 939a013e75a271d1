"""What the objective asks a family about its noise levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "velocity"]


class Noising:
    """Noise levels of a family, see `objective`. One that has neither SNR nor shift trains without what asks for them.

    Attributes:
        density: Of the noise levels where the configuration does not choose one.
        chosen_shift: `train.timestep_shift`.
        shifts_by_size: `train.timestep_dynamic_shift`.
    """

    density: ClassVar[Literal["logit_normal", "uniform"]] = "logit_normal"
    chosen_shift: float | None = None
    shifts_by_size: bool = False

    @property
    def prediction(self) -> Prediction | None:
        """What the denoiser predicts; None where it is none of those that SNR weights are known for."""
        return None

    def snr(self, time_B: Tensor) -> Tensor:
        """Signal-to-noise ratios (B,), fp32, in [0, inf]: squared share of the picture over that of the noise.

        Args:
            time_B: As in `base.Corrupted`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not know its signal-to-noise ratio")

    def noise_level(self, time_B: Tensor) -> Tensor:
        """Times as shares of the way from picture to noise, (B,) fp32 in [0, 1]."""
        raise NotImplementedError(f"{type(self).__name__} does not know how far a time is on the way to noise")

    def shift_of(self, shape: Sequence[int]) -> float:
        """K by which noise levels of latents of this shape (C, h, w) are shifted; 1 is none."""
        del shape
        return 1.0

    def refuse_shift_by_size(self) -> str | None:
        """Why `shifts_by_size` can't be asked of this model; None where it can."""
        return "this family does not shift by picture size"
