"""How the model lies on several processes: a copy on each (DDP), or shares of it (FSDP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from lora_api.archs import Arch

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig

Parallelism: TypeAlias = Literal["auto", "ddp", "fsdp"]


def against_sharding(config: TrainerConfig) -> str | None:
    """What of a configuration can't be done with a sharded denoiser, as `field: value ... why`; None when all can."""
    model, train, whole = config.model, config.train, config.network.type == "full"
    problems = (
        (
            model.arch == Arch.WAN22,
            "model.arch wan22, whose samples go to one of two experts: ranks would wait for each other",
        ),
        (model.quantize is not None, f"model.quantize {model.quantize}, whose weights can't be cut into shares"),
        (
            model.offload_blocks > 0,
            f"model.offload_blocks {model.offload_blocks:g}, whose blocks come and go on their own",
        ),
        (
            whole and train.optimizer != "adamw",
            f"train.optimizer {train.optimizer} and network.type full: only adamw works on shares of weights",
        ),
        (
            whole and train.ema_config.use_ema,
            "train.ema_config.use_ema: true and network.type full: averages of shares are not kept",
        ),
        (
            model.assistant_lora_path is not None,
            "model.assistant_lora_path, which is taken out of whole weights for samples",
        ),
    )
    return next((problem for found, problem in problems if found), None)


def is_sharded(config: TrainerConfig, processes: int) -> bool:
    """Whether the denoiser is sharded over the processes of a run.

    `auto` shards what is trained whole (`network.type: full`): weights, gradients and moments in fp32 take 16 bytes for
    each weight on each GPU otherwise. Adapters are small, and a copy of the frozen base on each GPU needs no gathering.

    Args:
        config: What to train.
        processes: Of the run, over all nodes; one process has nothing to shard.
    """
    wish = config.train.parallelism
    if processes == 1 or wish == "ddp":
        return False
    return wish == "fsdp" or (config.network.type == "full" and against_sharding(config) is None)


def fsdp_can_shard_it(config: TrainerConfig) -> str | None:
    """What is asked for by name and can't be done is refused; `auto` chooses ddp there."""
    if config.train.parallelism == "fsdp" and (problem := against_sharding(config)):
        return f"train.parallelism: fsdp is not supported with {problem}; set it to ddp"
    return None


RULES: tuple[Callable[[TrainerConfig], str | None], ...] = (fsdp_can_shard_it,)
"""See `rules`."""
