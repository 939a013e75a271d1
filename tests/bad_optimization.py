"""Mistakes about schedules, optimizers and averages: blocks of `spec.config`, and what is said."""

from __future__ import annotations

from typing import Any

FACTOR = "but with optimizer prodigy it is a factor on the rate that prodigy finds; set it to 1.0"
RULE = {"network": {"modules": [{"match": "*", "lr": 1e-4}]}}

TRAIN: list[tuple[dict[str, Any], str]] = [
    ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio: 0.1, and warmup_steps is 5; set one of them"),
    (
        {"lr_scheduler": "cosine_with_restarts"},
        (
            "lr_scheduler_params.num_cycles: 1 cycle never restarts; set 2 or more with lr_scheduler cosine_with_restarts, "
            "or choose cosine"
        ),
    ),
    *(
        (
            {"lr_scheduler": kind, "lr_scheduler_params": {name: value}},
            f"lr_scheduler_params.{name}: {value} plays no part with lr_scheduler {kind}; remove it",
        )
        for kind, name, value in (("cosine", "num_cycles", 2), ("rex", "power", 2), ("constant", "min_lr_ratio", 0.5))
    ),
    *(
        (
            {"optimizer": optimizer, name: value},
            f"{name}: {value} plays no part with optimizer {optimizer}; remove it",
        )
        for optimizer in ("lion", "adafactor")
        for name, value in (("adam_beta1", 0.8), ("adam_beta2", 0.99), ("adam_epsilon", 0.001))
    ),
    *(
        (
            {"optimizer": optimizer, "optimizer_params": {name: value}},
            f"optimizer_params.{name}: is for optimizer {owner}, and optimizer is {optimizer}; remove it",
        )
        for optimizer, owner, name, value in (
            ("adamw", "prodigy", "d_coef", 1.0),
            ("lion", "prodigy", "d0", 0.1),
            ("adamw8bit", "prodigy", "use_bias_correction", False),
            ("adafactor", "prodigy", "safeguard_warmup", True),
            ("adamw", "lion", "beta1", 0.9),
            ("adafactor", "lion", "beta2", 0.9),
            ("lion", "adafactor", "scale_parameter", True),
            ("adamw", "adafactor", "clip_threshold", 1.0),
            ("adamw", "adafactor", "decay_rate", -0.8),
            ("adamw", "schedule_free_adamw", "r", 0.0),
            ("lion", "schedule_free_adamw", "weight_lr_power", 2.0),
        )
    ),
    ({"optimizer": "prodigy"}, f"lr: 0.0001, {FACTOR}"),
    ({"optimizer": "prodigy", "lr": 1.0, "unet_lr": 1e-4}, f"unet_lr: 0.0001, {FACTOR}"),
    ({"optimizer": "prodigy", "lr": 1.0, "text_encoder_lr": 1e-5}, f"text_encoder_lr: 1e-05, {FACTOR}"),
    (
        {"optimizer": "schedule_free_adamw", "lr_scheduler": "cosine"},
        (
            "lr_scheduler: cosine, but optimizer schedule_free_adamw averages in place of a schedule; set constant, with a "
            "warm-up"
        ),
    ),
    (
        {"optimizer": "schedule_free_adamw", "adam_beta1": 0},
        "adam_beta1: 0, but optimizer schedule_free_adamw interpolates by it; expected a value above 0",
    ),
    (
        {"optimizer": "schedule_free_adamw", "ema_config": {"use_ema": True}},
        "ema_config.use_ema: true, but optimizer schedule_free_adamw averages by itself; set it to false",
    ),
]

CASES: list[tuple[dict[str, Any], str, str | None]] = [
    *(({"train": train}, f"train.{message}", None) for train, message in TRAIN),
    (
        RULE | {"train": {"optimizer": "prodigy", "lr": 1.0}},
        f"network.modules[0].lr: 0.0001, {FACTOR}",
        "spec.config.network.modules",
    ),
]
"""Blocks, message below `spec.config`, and the field that the API server names where it is another one."""
