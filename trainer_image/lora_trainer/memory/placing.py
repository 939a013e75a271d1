"""Brings a loaded base model into the format and to the place that the configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lora_api.config import ModelConfig
from lora_api.memory.estimate import GIB
from lora_api.training import TrainConfig
from lora_trainer.errors import ConfigurationError
from lora_trainer.memory.blocks import repeated_blocks
from lora_trainer.memory.checkpointing import EveryNth
from lora_trainer.memory.offload import Offload, chosen
from lora_trainer.memory.quantised import quantise_blocks

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel


log = logging.getLogger(__name__)


def loading_device(config: ModelConfig, device: torch.device) -> torch.device:
    """Where a base model is loaded: on the CPU where it would not have to fit on the device as it is in the file."""
    return device if config.quantize is None and not config.offload_blocks else torch.device("cpu")


def place_base(model: BaseModel, config: ModelConfig, device: torch.device) -> None:
    """Quantises what is to be quantised, and moves the model to the device; one that is there already stays as it is.

    Raises:
        ConfigurationError: The family has no blocks that could be quantised, or a weight is not finite.
    """
    model.text_format = config.quantize_te
    if config.quantize is not None:
        blocks = repeated_blocks(model.denoiser)
        resting = chosen(blocks, config.offload_blocks)
        count = 0
        try:
            for block in blocks:
                count += quantise_blocks([block], config.quantize, device)
                if any(block is each for each in resting):
                    block.to("cpu")
        except ValueError as error:
            raise ConfigurationError(f"config.model.quantize: {error}") from error
        log.info("%d linear layers of the base model are kept in %s", count, config.quantize)
        if count == 0:
            raise ConfigurationError(
                f"config.model.quantize: {type(model.denoiser).__name__} has no blocks with linear layers; remove it"
            )
    if device != model.device:
        resting = chosen(repeated_blocks(model.denoiser), config.offload_blocks)
        _move(model, resting, device)
        model.device = device


def _move(model: BaseModel, resting: Sequence[nn.Module], device: torch.device) -> None:
    """Moves all components of the pipeline but the resting blocks."""
    stay = {id(module) for block in resting for module in block.modules()}
    for component in model.pipe.components.values():
        if not isinstance(component, nn.Module):
            continue
        for module in component.modules():
            if id(module) in stay:
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)


def offload_blocks(model: BaseModel, config: ModelConfig, device: torch.device) -> Offload | None:
    """Lets the share of blocks rest that the configuration asks for; after adapters were added, which do not rest.

    Raises:
        ConfigurationError: There are no blocks, or the share comes to none of them.
    """
    if not config.offload_blocks:
        return None
    blocks = repeated_blocks(model.denoiser)
    resting = chosen(blocks, config.offload_blocks)
    if not resting:
        raise ConfigurationError(
            f"config.model.offload_blocks: {config.offload_blocks:g} of {len(blocks)} blocks is none; raise it, or set it to 0"
        )
    offload = Offload(device)
    for block in resting:
        offload.add(block)
    names = {id(t): name for name, t in (*model.denoiser.named_parameters(), *model.denoiser.named_buffers())}
    frozen = [t for block in resting for t in (*block.parameters(), *block.buffers()) if not t.requires_grad]
    # DistributedDataParallel wants all that it looks after on one device
    model.denoiser._ddp_params_and_buffers_to_ignore = [names[id(t)] for t in frozen]  # type: ignore[assignment] # noqa: SLF001 its name there
    log.info("%d of %d blocks rest in CPU memory, %.2f GiB", len(resting), len(blocks), offload.resting_bytes / GIB)
    return offload


def checkpointing(config: TrainConfig, *, offloaded: bool = False) -> tuple[Callable[..., Any], ...]:
    """What `enable_gradient_checkpointing` is called with: nothing where every block is recomputed and none rests."""
    every = config.gradient_checkpointing_every
    return () if every == 1 and not offloaded else (EveryNth(every),)
