"""Devices, number formats and the group of ranks: what has to be the same on one process and on many."""

from __future__ import annotations

import datetime as dt
import inspect
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lora_api.training import Precision
from lora_trainer.environment import Environment
from lora_trainer.errors import ConfigurationError

Value = TypeVar("Value")

TORCH_DTYPE = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}
_COLLECTIVE_MINUTES = 15  # a rank that says nothing for so long is gone
_WAIT_HOURS = 24  # rank 0 may encode, draw and export for long while the others wait
_POLL_SECONDS = 0.02


def device_for(wish: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Args:
        wish: `config.device`: auto, cuda or cpu.
        local_rank: Number of the process on this node.

    Raises:
        ConfigurationError: When CUDA is asked for and not there, or has fewer devices than the node has processes.
    """
    count = torch.cuda.device_count() if wish in ("auto", "cuda") and torch.cuda.is_available() else 0
    if wish == "cpu" or (wish == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigurationError(
            f"config.device: {wish} needs a CUDA device for local rank {local_rank}, but this node shows {count}; "
            "ask for GPUs (resources.gpusPerNode), or set device to cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """What a device is called by its maker; `cpu` for CPUs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The forward pass in a number format; adapters stay fp32 underneath."""
    if precision is Precision.FP32:
        return nullcontext()
    return torch.autocast(device.type, dtype=TORCH_DTYPE[precision])


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after an iteration: the same on each of them."""

    loss: float  # mean over all samples
    grad_norm: float
    stop: bool  # some rank was asked to stop
    news: bool  # rank 0 has a newer control document
    saving: int = 0  # how rank 0's newest save stands, a `saver.Saving`

    @property
    def finite(self) -> bool:
        """Whether the update may be made."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Group:
    """All ranks of a start. With one process every method is local."""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, *, local_rank: int = 0, local_world_size: int = 1
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._local_rank, self._local_world_size = local_rank, local_world_size
        self._patient: Any = None

    @classmethod
    def form(cls, environment: Environment, device: torch.device) -> Group:
        """Joins the group that torchrun's variables describe: NCCL between GPUs, gloo between CPUs.

        Raises:
            torch.distributed.DistError: When the others can't be reached.
        """
        group = cls(
            environment.rank, environment.world_size, device,
            local_rank=environment.local_rank, local_world_size=environment.local_world_size,
        )  # fmt: skip
        if environment.world_size > 1:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=dt.timedelta(minutes=_COLLECTIVE_MINUTES),
                device_id=device if device.type == "cuda" else None,
            )
            group._patient = dist.new_group(backend="gloo", timeout=dt.timedelta(hours=_WAIT_HOURS))
        return group

    def wrap(self, module: nn.Module, *, whole: bool = False) -> nn.Module:
        """The module, with gradients averaged over ranks by DDP; as it is when nothing in it is trained.

        Args:
            module: What is trained.
            whole: Whether all of its weights are. Some may have no part in a loss then, such as what the last block of Qwen-Image
                does to its text, and DDP has to look for them.
        """
        if self.world_size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        sync = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # renamed in torch 2.15
        return nn.parallel.DistributedDataParallel(
            module,
            device_ids=ids,
            gradient_as_bucket_view=True,
            find_unused_parameters=whole,
            **{sync: False},  # type: ignore[arg-type]
        )

    def average(self, gradients: list[Tensor]) -> None:
        """Averages over ranks, in place, what belongs to no wrapped module; every rank has the same gradients."""
        if self.world_size == 1 or not gradients:
            return
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / self.world_size, gradients)

    def agree(self, loss: Tensor, grad_norm: Tensor, *, stop: bool, news: bool, saving: int = 0) -> Agreement:
        """Makes one iteration's facts common to all ranks; the only wait for the device in an iteration.

        Args:
            loss: Mean loss of this rank, () fp32 on the device.
            grad_norm: Norm of the averaged gradients, () fp32 on the device.
            stop: Whether this process was asked to stop.
            news: Whether this process has a newer control document.
            saving: How its newest save stands; 0 on every rank but the one that saves.
        """
        if self.world_size == 1:
            values = torch.stack((loss, grad_norm)).tolist()
            return Agreement(values[0], values[1], stop, news, saving)
        flags = loss.new_tensor((float(stop), float(news), float(saving)))
        facts = torch.cat((torch.stack((loss, grad_norm)), flags))
        dist.all_reduce(facts)
        values = facts.tolist()
        loss_mean, norm_mean = values[0] / self.world_size, values[1] / self.world_size
        return Agreement(loss_mean, norm_mean, values[2] > 0, values[3] > 0, round(values[4]))

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's value, on every rank; it has to be picklable."""
        if self.world_size == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]  # type: ignore[no-any-return]

    def wait(self, check: Callable[[], None]) -> None:
        """Waits until every rank is here; `check` is called meanwhile and may raise.

        Raises:
            RuntimeError: When another rank is gone.
        """
        if self.world_size == 1:
            check()
            return
        work = dist.barrier(group=self._patient, async_op=True)
        while not work.is_completed():
            check()
            time.sleep(_POLL_SECONDS)
        work.wait()

    def any(self, mine: bool) -> bool:  # noqa: FBT001 - the value that is shared
        """Whether it is true on any rank; every rank has to ask."""
        if self.world_size == 1:
            return mine
        fact = torch.tensor(float(mine))
        dist.all_reduce(fact, dist.ReduceOp.MAX, group=self._patient)
        return bool(fact)

    def by_turns(self, work: Callable[[], None]) -> None:
        """Does something on one rank of each node after another, so that one rank's host memory is enough for it."""
        for turn in range(self._local_world_size):
            if turn == self._local_rank:
                work()
            self.wait(lambda: None)

    def close(self) -> None:
        """Leaves the group; only after a good end, it would wait for a broken one."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def synchronise(device: torch.device) -> None:
    """Waits until a device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
