"""Adapters of the denoiser, and the denoiser itself where all of it is trained. The one package that may import peft."""

from lora_trainer.networks.adapter import Adapter, add_adapter
from lora_trainer.networks.assistant import Assistant, merge_assistant
from lora_trainer.networks.factors import Factors
from lora_trainer.networks.full import FullFineTune, train_all
from lora_trainer.networks.installed import installed_adapter
from lora_trainer.networks.spec import Layer, Targets, build_peft_configs, plan_layers, resolve_targets
from lora_trainer.networks.trainable import Trainable
from lora_trainer.networks.warm import WarmStart, warm_start

__all__ = [
    "Adapter",
    "Assistant",
    "Factors",
    "FullFineTune",
    "Layer",
    "Targets",
    "Trainable",
    "WarmStart",
    "add_adapter",
    "build_peft_configs",
    "installed_adapter",
    "merge_assistant",
    "plan_layers",
    "resolve_targets",
    "train_all",
    "warm_start",
]
