"""FSDP2: the denoiser's weights lie in shares on the ranks, and come together one block at a time.

The frozen weights of a base model are sharded in their own number format. Adapters stay whole on every rank: they are
small, and whole they are trained, saved and exported as without sharding. Trained weights (`network.type: full`) are
sharded in fp32, with their gradients and moments; the forward pass casts them under autocast exactly as it does on one
process, so that sharding changes the order of sums and nothing else.

References:
    Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3 (sharding, gathering
    by unit). Checked in tests/trainer/test_fsdp.py against one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lora_trainer.runtime import Group
from lora_trainer.spread import Spread, gradient_norm

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

log = logging.getLogger(__name__)

WHOLE_GRADIENTS_SHARE = 0.25
"""Gradients of several micro-batches are added up whole, and averaged once, where they take no more of a GPU than this."""


def blocks_of(denoiser: nn.Module) -> list[nn.Module]:
    """The modules that are sharded on their own, inner ones first.

    They are what the denoiser's class calls blocks that can't be split; where it says nothing, the members of its lists.

    Raises:
        ValueError: When it has no blocks: sharding would gather all of it at once and save nothing.
    """
    names = set(getattr(denoiser, "_no_split_modules", None) or ())
    found = [module for module in denoiser.modules() if type(module).__name__ in names and module is not denoiser]
    if not found:
        lists = [module for module in denoiser.modules() if isinstance(module, nn.ModuleList)]
        found = [module for each in lists for module in each]
    if not found:
        raise ValueError(f"train.parallelism: {type(denoiser).__name__} has no blocks to shard by; set it to ddp")
    return found[::-1]  # `modules` lists parents first


def adds_up_whole(gradient_bytes: int, device_bytes: int | None) -> bool:
    """Whether micro-batches add up whole gradients on each rank (one averaging for each update) or shares of them.

    Shares need an averaging for each micro-batch, but no more memory however many there are.

    Args:
        gradient_bytes: Of all gradients together, unsharded.
        device_bytes: Memory of the smallest GPU among the ranks; None on CPUs.
    """
    return device_bytes is None or gradient_bytes <= WHOLE_GRADIENTS_SHARE * device_bytes


def shard(model: BaseModel, group: Group, whole: Sequence[nn.Parameter]) -> Sharded:
    """Shards the denoiser of `model` over all ranks, in place, block by block, and moves it to the device.

    Args:
        model: A loaded base model; its denoiser may lie on the CPU.
        group: All ranks.
        whole: Parameters in it that are not sharded: adapters.

    Raises:
        ValueError: When it has no blocks, or several denoisers.
    """
    denoiser = model.denoiser
    if len(model.export_parts) > 1:
        raise ValueError("train.parallelism: fsdp is not supported for models with several denoisers; set it to ddp")
    blocks = blocks_of(denoiser)
    for parameter in whole:
        parameter.data = parameter.data.to(group.device)
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": set(whole),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    for module in [*blocks, denoiser]:
        fully_shard(module, **options)
        assert isinstance(module, FSDPModule)
        if group.device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    log.info("the denoiser is sharded over %d ranks, in %d blocks", group.world_size, len(blocks))
    return Sharded(group, denoiser)


class Sharded(Spread):
    """A share of each of the denoiser's weights on each rank; adapters whole on every rank."""

    sharded: ClassVar[bool] = True

    def __init__(self, group: Group, module: nn.Module) -> None:
        super().__init__(group, module)
        self._ranks = group
        self._root = module
        self._whole_sums: bool | None = None

    # ------------------------------------------------------------------ gradients
    def apart(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """See `Spread.apart`: all that is not sharded."""
        return [parameter for parameter in parameters if not isinstance(parameter, DTensor)]

    def without_sync(self) -> AbstractContextManager[Any]:
        """See `Spread.without_sync`; see `adds_up_whole`."""
        if self._whole_sums is None:
            self._whole_sums = self._decide()
        return self._adding_up() if self._whole_sums else nullcontext()

    @contextmanager
    def _adding_up(self) -> Iterator[None]:
        self._fsdp.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._fsdp.set_requires_gradient_sync(True)

    def _decide(self) -> bool:
        """The same on every rank."""
        size = sum(p.numel() * 4 for p in self._root.parameters() if isinstance(p, DTensor) and p.requires_grad)
        if self._ranks.device.type != "cuda":
            return adds_up_whole(size, None)
        least = torch.tensor(
            torch.cuda.get_device_properties(self._ranks.device).total_memory, device=self._ranks.device
        )
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return adds_up_whole(size, int(least))

    def held(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """See `Spread.held`."""
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """See `Spread.norm`: the root of the sum of the squares of all shares' norms.

        Either all gradients are sharded or none is: adapters are trained whole, and the weights themselves in shares.
        """
        norm = gradient_norm(gradients)
        if not self._trains_shares:
            return norm
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    @property
    def _trains_shares(self) -> bool:
        return any(parameter.requires_grad for parameter in self._root.parameters() if isinstance(parameter, DTensor))

    def clip(self, parameters: Sequence[Tensor], limit: float, norm: Tensor) -> None:
        """See `Spread.clip`; as torch.nn.utils.clip_grads_with_norm_, whose tensors may not lie in shares beside whole ones."""
        gradients = self.held([parameter.grad for parameter in parameters if parameter.grad is not None])
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, factor)

    # ------------------------------------------------------------------ values
    def gathered(self, tensor: Tensor) -> Tensor:
        """See `Spread.gathered`; no more than this one tensor is whole on the device, for as long as it is copied."""
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        gathered: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return gathered

    def whole(self, tensor: Tensor, *, keep: bool = True) -> Tensor:
        """See `Spread.whole`."""
        gathered = self.gathered(tensor)
        return gathered.to("cpu", copy=True).contiguous() if keep else torch.empty_like(gathered, device="meta")

    def part(self, like: Tensor, whole: Tensor) -> Tensor:
        """See `Spread.part`: sharded weights are cut along their first axis."""
        if not isinstance(like, DTensor):
            return whole
        parts = torch.chunk(whole, self._ranks.world_size)
        return parts[self._ranks.rank] if self._ranks.rank < len(parts) else whole[:0]

    def like(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """See `Spread.like`."""
        if not isinstance(parameter, DTensor):
            return whole
        result: Tensor = torch.empty_like(parameter, dtype=whole.dtype)
        self.fill(result, whole)
        return result

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        """See `Spread.fill`."""
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(self.part(tensor, whole))
        else:
            tensor.copy_(whole)

    def settled(self) -> None:
        """See `Spread.settled`: the outermost weights stay whole after a forward pass, for the backward pass."""
        self._fsdp.reshard()

    def by_turns(self, work: Callable[[], None]) -> None:
        """See `Spread.by_turns`."""
        self._ranks.by_turns(work)

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self._root, FSDPModule)
        return self._root
