"""Blocks of a configuration whose settings for memory don't fit, with what is said about each: (blocks, message)."""

from __future__ import annotations

from typing import Any

CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"arch": "zimage", "name_or_path": "/m", "quantize": "nf4"}, "network": {"type": "full"}},
        "model.quantize: nf4 weights can't be trained; remove it, or use another network.type than full",
    ),
    (
        {
            "model": {"arch": "sd15", "name_or_path": "/m", "quantize_te": "int8"},
            "train": {"train_text_encoder": True},
        },
        (
            "model.quantize_te: int8 is for text encoders that are let go after captions are encoded, but "
            "train.train_text_encoder is true; remove it"
        ),
    ),
    (
        {"model": {"arch": "zimage", "name_or_path": "/m", "offload_blocks": 0.5}, "network": {"type": "full"}},
        "model.offload_blocks: 0.5 is for weights that stay as they are, not for network.type full; set it to 0",
    ),
    (
        {"model": {"arch": "zimage", "name_or_path": "/m", "offload_blocks": 1}, "train": {"compile": True}},
        "model.offload_blocks: 1 can't be combined with train.compile: true; set one of them back",
    ),
    (
        {"train": {"gradient_checkpointing_every": 2}},
        "train.gradient_checkpointing_every: 2 plays no part, because gradient_checkpointing is false; set that to true",
    ),
]
