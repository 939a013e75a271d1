"""How what is trained lies on the ranks: a copy on each of them, or (see `sharding`) a share on each.

The loop, checkpoints and exports ask a `Spread` instead of knowing which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from lora_trainer.runtime import Group


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all gradients together, () fp32.

    On CPUs one copy and one norm are five times faster than a norm for each of many small tensors.
    """
    if gradients[0].device.type == "cpu":
        norm: Tensor = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
        return norm
    return get_total_norm(gradients, foreach=True)


class Spread:
    """A copy on each rank. DDP averages the gradients of what it wraps; what is trained outside of it is averaged here."""

    sharded: ClassVar[bool] = False

    def __init__(self, group: Group | None = None, module: nn.Module | None = None) -> None:
        self.group = group
        self.module = module  # what `predict` calls

    # ------------------------------------------------------------------ gradients
    def apart(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those of the parameters whose gradients nobody else averages: text encoders beside a wrapped denoiser."""
        assert self.module is not None
        wrapped = {id(parameter) for parameter in self.module.parameters()}
        return [parameter for parameter in parameters if id(parameter) not in wrapped]

    def without_sync(self) -> AbstractContextManager[Any]:
        """Inside, backward passes add up gradients without averaging them over ranks."""
        return getattr(self.module, "no_sync", nullcontext)()

    def held(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """What this rank holds of each gradient, as plain tensors that share its memory."""
        return list(gradients)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Norm of all averaged gradients together, () fp32, the same on every rank.

        Args:
            gradients: What `held` returned.
        """
        return gradient_norm(gradients)

    def clip(self, parameters: Sequence[Tensor], limit: float, norm: Tensor) -> None:
        """Scales the gradients of the parameters down to a norm of `limit`, where `norm` is above it."""
        clip_grads_with_norm_(parameters, limit, norm, foreach=True)

    # ------------------------------------------------------------------ values
    def gathered(self, tensor: Tensor) -> Tensor:
        """All of a tensor, where it lies; every rank has to ask where it is sharded."""
        return tensor.detach()

    def whole(self, tensor: Tensor, *, keep: bool = True) -> Tensor:
        """A copy of all of a tensor, on the CPU; every rank has to ask where it is sharded.

        Args:
            tensor: A parameter, or something of its shape that belongs to one.
            keep: False: the caller only takes part, and gets a tensor without data.
        """
        del keep
        return tensor.detach().to("cpu", copy=True).contiguous()

    def part(self, like: Tensor, whole: Tensor) -> Tensor:
        """What this rank holds of `whole`, where `like` lies in the same way."""
        del like
        return whole

    def like(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """A new tensor with the values of `whole` that lies on the ranks as the parameter does."""
        del parameter
        return whole

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        """Gives a tensor the values of `whole`, to the bit; each rank takes its own."""
        tensor.copy_(whole)

    def settled(self) -> None:
        """Called when forward passes without backward passes are over (samples): memory they hold is let go."""

    def by_turns(self, work: Callable[[], None]) -> None:
        """Does on each rank what needs much host memory; where the model is sharded, one rank of a node after another."""
        work()
