"""Adapters: everything the trainer knows about peft, and the only package that may import it."""

from lora_trainer.networks.adapter import Adapter, add_adapter
from lora_trainer.networks.assistant import Assistant, merge_assistant
from lora_trainer.networks.installed import installed_adapter
from lora_trainer.networks.spec import Targets, build_peft_config, resolve_targets

__all__ = [
    "Adapter",
    "Assistant",
    "Targets",
    "add_adapter",
    "build_peft_config",
    "installed_adapter",
    "merge_assistant",
    "resolve_targets",
]
