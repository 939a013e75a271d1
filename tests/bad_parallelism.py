"""What `train.parallelism: fsdp` is refused with: other blocks of `spec.config`, and what is said."""

from __future__ import annotations

from typing import Any

CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"arch": "zimage", "name_or_path": "/m", "offload_blocks": 0.5}},
        "model.offload_blocks 0.5, whose blocks come and go on their own",
    ),
    (
        {"model": {"arch": "zimage", "name_or_path": "/m", "quantize": "nf4"}},
        "model.quantize nf4, whose weights can't be cut into shares",
    ),
    (
        {"network": {"type": "full"}, "train": {"parallelism": "fsdp", "optimizer": "lion"}},
        "train.optimizer lion and network.type full: only adamw works on shares of weights",
    ),
    (
        {"network": {"type": "full"}, "train": {"parallelism": "fsdp", "ema_config": {"use_ema": True}}},
        "train.ema_config.use_ema: true and network.type full: averages of shares are not kept",
    ),
    (
        {"model": {"arch": "wan22", "name_or_path": "/m"}},
        "model.arch wan22, whose samples go to one of two experts: ranks would wait for each other",
    ),
    (
        {"model": {"arch": "zimage:turbo", "name_or_path": "/m", "assistant_lora_path": "/a.safetensors"}},
        "model.assistant_lora_path, which is taken out of whole weights for samples",
    ),
]
