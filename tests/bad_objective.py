"""Mistakes in noise levels and losses: the family, `train`, and what is said below `spec.config.train`."""

from __future__ import annotations

from typing import Any

DELTAS = "it is for huber, smooth_l1, pseudo_huber"

CASES: list[tuple[str, dict[str, Any], str]] = [
    (
        "zimage",
        {"logit_mean": 0.5, "timestep_type": "uniform"},
        "logit_mean: 0.5 plays no part with timestep_type uniform; it is for logit_normal",
    ),
    ("sdxl", {"logit_std": 2}, "logit_std: 2 plays no part with timestep_type uniform; it is for logit_normal"),
    ("zimage", {"mode_scale": 1}, "mode_scale: 1 plays no part with timestep_type logit_normal; it is for mode"),
    ("sd15", {"min_timestep": 500, "max_timestep": 500}, "min_timestep: 500 must be below max_timestep, 500"),
    ("sd15", {"timestep_shift": 3}, "timestep_shift: is for flow matching, and model.arch sd15 is a DDPM; remove it"),
    (
        "zimage",
        {"timestep_dynamic_shift": True},
        (
            "timestep_dynamic_shift: true, but model.arch zimage is not shifted by picture size; set it to false, or "
            "timestep_shift to a number"
        ),
    ),
    (
        "flux1",
        {"timestep_dynamic_shift": True, "timestep_shift": 3},
        "timestep_dynamic_shift: true excludes timestep_shift; keep one of them",
    ),
    ("flux1", {"huber_delta": 0.5}, f"huber_delta: plays no part with loss_type mse; {DELTAS}"),
    (
        "flux1",
        {"huber_schedule": "snr", "loss_type": "mae"},
        f"huber_schedule: plays no part with loss_type mae; {DELTAS}",
    ),
    (
        "flux1",
        {"huber_schedule": "snr", "loss_type": "huber", "huber_delta": 2},
        "huber_delta: 2 is above 1, where huber_schedule snr begins",
    ),
    (
        "flux1",
        {"min_snr_gamma": 5, "loss_weighting": "cosmap"},
        "min_snr_gamma: excludes loss_weighting; keep one of them",
    ),
    (
        "sd15",
        {"loss_weighting": "cosmap"},
        "loss_weighting: cosmap is for flow matching, and model.arch sd15 is a DDPM; use min_snr_gamma",
    ),
]

WITHOUT = "plays no part without a mask; set mask_path or alpha_mask, or remove it"

MASKS: list[tuple[dict[str, Any], str]] = [
    (
        {"mask_path": "/m", "alpha_mask": True},
        "spec.config.datasets[0].alpha_mask: true excludes mask_path; keep one of them",
    ),
    ({"invert_mask": True}, f"spec.config.datasets[0].invert_mask: {WITHOUT}"),
    ({"mask_min_value": 0.1}, f"spec.config.datasets[0].mask_min_value: {WITHOUT}"),
]
