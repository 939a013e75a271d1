"""The twin of `parallelism.fsdp_can_shard_it`; see `cel`."""

from __future__ import annotations

from lora_api.archs import Arch
from lora_api.cel.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    Rule(
        on=("spec", "config"),
        rule=f"self.train.parallelism != 'fsdp' || {rule}",
        message=f"fsdp is not supported with {found}; set it to ddp",
        field="train.parallelism",
    )
    for found, rule in (
        ("model.arch wan22, which has two experts", f"self.model.arch != '{Arch.WAN22}'"),
        ("model.quantize", "!has(self.model.quantize)"),
        ("model.offload_blocks", "self.model.offload_blocks == 0.0"),
        (
            "this train.optimizer and network.type full",
            "self.network.type != 'full' || self.train.optimizer == 'adamw'",
        ),
        (
            "train.ema_config.use_ema: true and network.type full",
            "self.network.type != 'full' || !self.train.ema_config.use_ema",
        ),
        ("model.assistant_lora_path", "!has(self.model.assistant_lora_path)"),
    )
)
