"""What noise levels and losses ask of each other and of the family; see `rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_api.archs import CUSTOM_PREFIX, DYNAMIC_SHIFT_ARCHS, UNET_ARCHS
from lora_api.training import DELTA_LOSSES

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig


def density_settings_play_a_part(config: TrainerConfig) -> str | None:
    """A mean for a density that has none would be ignored; families of other packages know their own density."""
    train, arch = config.train, config.model.arch
    density = train.timestep_type or ("uniform" if arch in UNET_ARCHS else "logit_normal")
    if train.timestep_type is None and arch.startswith(CUSTOM_PREFIX):
        return None
    for name, value, owner, default in (
        ("logit_mean", train.logit_mean, "logit_normal", 0.0),
        ("logit_std", train.logit_std, "logit_normal", 1.0),
        ("mode_scale", train.mode_scale, "mode", 1.29),
    ):
        if value != default and density != owner:
            return f"train.{name}: {value:g} plays no part with timestep_type {density}; it is for {owner}"
    return None


def some_noise_levels_are_left(config: TrainerConfig) -> str | None:
    """The lowest noise level is below the highest."""
    train = config.train
    if train.min_timestep >= train.max_timestep:
        return f"train.min_timestep: {train.min_timestep:g} must be below max_timestep, {train.max_timestep:g}"
    return None


def noise_levels_are_shifted_one_way(config: TrainerConfig) -> str | None:
    """The shift is static or by picture size, and of flow matching."""
    train, arch = config.train, config.model.arch
    if arch in UNET_ARCHS and train.timestep_shift is not None:
        return f"train.timestep_shift: is for flow matching, and model.arch {arch} is a DDPM; remove it"
    known = arch in DYNAMIC_SHIFT_ARCHS or arch.startswith(CUSTOM_PREFIX)
    if train.timestep_dynamic_shift and not known:
        return (
            f"train.timestep_dynamic_shift: true, but model.arch {arch} is not shifted by picture size; "
            "set it to false, or timestep_shift to a number"
        )
    if train.timestep_dynamic_shift and train.timestep_shift is not None:
        return "train.timestep_dynamic_shift: true excludes timestep_shift; keep one of them"
    return None


def delta_settings_play_a_part(config: TrainerConfig) -> str | None:
    """A delta for a loss that has none would be ignored; schedules go from 1 down to it."""
    train = config.train
    if train.loss_type in DELTA_LOSSES:
        if train.huber_schedule != "constant" and train.huber_delta > 1:
            return f"train.huber_delta: {train.huber_delta:g} is above 1, where huber_schedule {train.huber_schedule} begins"
        return None
    for name, changed in (
        ("huber_delta", train.huber_delta != 0.1),
        ("huber_schedule", train.huber_schedule != "constant"),
    ):
        if changed:
            return f"train.{name}: plays no part with loss_type {train.loss_type}; it is for {', '.join(DELTA_LOSSES)}"
    return None


def samples_are_weighed_one_way(config: TrainerConfig) -> str | None:
    """Two weights by noise level would multiply to a third that nobody has published."""
    train, arch = config.train, config.model.arch
    if train.loss_weighting == "none":
        return None
    if train.min_snr_gamma is not None:
        return "train.min_snr_gamma: excludes loss_weighting; keep one of them"
    if arch in UNET_ARCHS:
        return (
            f"train.loss_weighting: {train.loss_weighting} is for flow matching, and model.arch {arch} is a DDPM; "
            "use min_snr_gamma"
        )
    return None


RULES = (
    density_settings_play_a_part,
    some_noise_levels_are_left,
    noise_levels_are_shifted_one_way,
    delta_settings_play_a_part,
    samples_are_weighed_one_way,
)
