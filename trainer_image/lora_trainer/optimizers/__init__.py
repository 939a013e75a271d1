"""Optimizers over fp32 parameters: how they are built, and their state as tensors and plain data."""

from lora_trainer.optimizers.build import build_optimizer
from lora_trainer.optimizers.state import OptimizerState, load_state, state_of

__all__ = ["OptimizerState", "build_optimizer", "load_state", "state_of"]
