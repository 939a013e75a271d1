"""Brings a loaded base model into the format and to the place that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lora_api.config import ModelConfig
from lora_api.training import TrainConfig
from lora_trainer.errors import ConfigurationError
from lora_trainer.memory.blocks import repeated_blocks
from lora_trainer.memory.checkpointing import EveryNth
from lora_trainer.memory.quantised import quantise_blocks

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel


def loading_device(config: ModelConfig, device: torch.device) -> torch.device:
    """Where a base model is loaded: on the CPU where it would not have to fit on the device as it is in the file."""
    return device if config.quantize is None else torch.device("cpu")


def place_base(model: BaseModel, config: ModelConfig, device: torch.device) -> None:
    """Quantises what is to be quantised, and moves the model to the device; one that is there already stays as it is.

    Raises:
        ConfigurationError: The family has no blocks that could be quantised, or a weight is not finite.
    """
    model.text_format = config.quantize_te
    if config.quantize is not None:
        blocks = repeated_blocks(model.denoiser)
        try:
            count = quantise_blocks(blocks, config.quantize, device)
        except ValueError as error:
            raise ConfigurationError(f"config.model.quantize: {error}") from error
        if count == 0:
            raise ConfigurationError(
                f"config.model.quantize: {type(model.denoiser).__name__} has no blocks with linear layers; remove it"
            )
    if device != model.device:
        model.pipe.to(device)
        model.device = device


def checkpointing(config: TrainConfig) -> tuple[Callable[..., Any], ...]:
    """What `enable_gradient_checkpointing` is called with: nothing where every block is recomputed."""
    every = config.gradient_checkpointing_every
    return () if every == 1 else (EveryNth(every),)
