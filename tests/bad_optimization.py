"""Mistakes in `spec.config.train` about schedules, optimizers and averages: value of the block, and what is said."""

from __future__ import annotations

from typing import Any

CASES: list[tuple[dict[str, Any], str]] = [
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
]
