"""The twins of `rules.objective`, and of the masks of datasets, for the API server; see `cel`."""

from __future__ import annotations

from lora_api.archs import CUSTOM_PREFIX, DYNAMIC_SHIFT_ARCHS, UNET_ARCHS
from lora_api.cel.rule import Rule, listed
from lora_api.schema import ITEMS
from lora_api.training import DELTA_LOSSES

_UNET = f"self.model.arch in {listed(sorted(UNET_ARCHS))}"
_CUSTOM = f"self.model.arch.startsWith('{CUSTOM_PREFIX}')"
_DELTA = f"self.loss_type in {listed(DELTA_LOSSES)}"


def _density(owner: str, setting: str) -> str:
    """The rule of a setting that only one density has: it is at its default, or the density is that one."""
    family = f"{_CUSTOM} || !({_UNET})" if owner == "logit_normal" else _CUSTOM
    return f"self.train.{setting} || (has(self.train.timestep_type) ? self.train.timestep_type == '{owner}' : {family})"


RULES: tuple[Rule, ...] = (
    *(
        Rule(
            on=("spec", "config"),
            rule=_density(owner, f"{name} == {default}"),
            message=f"plays no part with this density of noise levels; it is for timestep_type {owner}",
            field=f"train.{name}",
        )
        for name, owner, default in (
            ("logit_mean", "logit_normal", "0.0"),
            ("logit_std", "logit_normal", "1.0"),
            ("mode_scale", "mode", "1.29"),
        )
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.min_timestep < self.max_timestep",
        message="must be below max_timestep",
        field="min_timestep",
    ),
    Rule(
        on=("spec", "config"),
        rule=f"!has(self.train.timestep_shift) || !({_UNET})",
        message="is for flow matching, and this model.arch is a DDPM; remove it",
        field="train.timestep_shift",
    ),
    Rule(
        on=("spec", "config"),
        rule=f"!self.train.timestep_dynamic_shift || self.model.arch in {listed(sorted(DYNAMIC_SHIFT_ARCHS))} || {_CUSTOM}",
        message="true, but this model.arch is not shifted by picture size; set it to false, or timestep_shift to a number",
        field="train.timestep_dynamic_shift",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="!self.timestep_dynamic_shift || !has(self.timestep_shift)",
        message="true excludes timestep_shift; keep one of them",
        field="timestep_dynamic_shift",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule=f"{_DELTA} ? (self.huber_schedule == 'constant' || self.huber_delta <= 1.0) : self.huber_delta == 0.1",
        message=f"is for {', '.join(DELTA_LOSSES)} only, and at most 1 with a huber_schedule, which begins there",
        field="huber_delta",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule=f"{_DELTA} || self.huber_schedule == 'constant'",
        message=f"plays no part with this loss_type; it is for {', '.join(DELTA_LOSSES)}",
        field="huber_schedule",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="!has(self.min_snr_gamma) || self.loss_weighting == 'none'",
        message="excludes loss_weighting; keep one of them",
        field="min_snr_gamma",
    ),
    Rule(
        on=("spec", "config"),
        rule=f"self.train.loss_weighting == 'none' || !({_UNET})",
        message="is for flow matching, and this model.arch is a DDPM; use min_snr_gamma",
        field="train.loss_weighting",
    ),
    Rule(
        on=("spec", "config", "datasets", ITEMS),
        rule="!self.alpha_mask || !has(self.mask_path)",
        message="true excludes mask_path; keep one of them",
        field="alpha_mask",
    ),
    *(
        Rule(
            on=("spec", "config", "datasets", ITEMS),
            rule=f"self.{unset} || self.alpha_mask || has(self.mask_path)",
            message="plays no part without a mask; set mask_path or alpha_mask, or remove it",
            field=field,
        )
        for field, unset in (("invert_mask", "invert_mask == false"), ("mask_min_value", "mask_min_value == 0.0"))
    ),
)
