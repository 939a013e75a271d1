"""Gradient checkpointing of some blocks: their activations are computed again in the backward pass, those of others kept.

References:
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4. Checked in
    tests/trainer/test_checkpointing.py.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

_RECOMPUTED: ContextVar[bool] = ContextVar("recomputed", default=False)


def is_recomputed() -> bool:
    """Whether the block that runs now keeps nothing of this call, or is being computed again."""
    return _RECOMPUTED.get()


class EveryNth:
    """Calls blocks; every n-th of them, the first among them, is recomputed in the backward pass.

    Blocks are numbered in the order of their first call, which is that of the forward pass.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._numbers: dict[nn.Module, int] = {}

    def __call__(self, block: nn.Module, *arguments: Any) -> Any:
        """What the block answers."""
        if self._numbers.setdefault(block, len(self._numbers)) % self._every:
            return block(*arguments)

        def call(*inner: Any) -> Any:
            token = _RECOMPUTED.set(True)
            try:
                return block(*inner)
            finally:
                _RECOMPUTED.reset(token)

        return checkpoint(call, *arguments, use_reentrant=False)
