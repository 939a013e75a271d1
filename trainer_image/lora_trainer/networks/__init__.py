"""Adapters: everything the trainer knows about peft, and the only package that may import it."""

from lora_trainer.networks.adapter import CLIP_PREFIX, Adapter, add_adapter
from lora_trainer.networks.installed import installed_adapter
from lora_trainer.networks.spec import Targets, build_peft_config, resolve_targets

__all__ = [
    "CLIP_PREFIX",
    "Adapter",
    "Targets",
    "add_adapter",
    "build_peft_config",
    "installed_adapter",
    "resolve_targets",
]
