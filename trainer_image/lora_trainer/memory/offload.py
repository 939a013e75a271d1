"""Frozen blocks that rest in CPU memory and visit the device for their forward and backward pass.

While a block runs, its weights stand in as tensors on the device; afterwards the layers hold the resting ones again. What
autograd would keep of the visitors is replaced by a note that names them, and they are fetched again for the backward
pass: so no more than the block at work and its neighbours are on the device. Under gradient checkpointing the
block is called again before its backward pass, and autograd keeps nothing in between, so visitors may be kept then.

On a GPU the weights rest in pinned memory and the next block is fetched on a stream of its own while this one computes;
elsewhere they are copied where they are needed. The arithmetic is the same, to the bit. Python is ahead of a GPU, and
memory of a block that has left can be used again only when the GPU is done with it: so no block is fetched before the one
that ran two before it is done.

References:
    Rhu et al. 2016, "vDNN", section 3 (offload and prefetch by layer). Checked in tests/trainer/test_offload.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_api.memory.estimate import spread
from lora_trainer.memory.checkpointing import is_recomputed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Resting:
    """One frozen tensor of a block.

    Attributes:
        owner: The dictionary of a layer's parameters or buffers that it stands in.
        name: Its key.
        tensor: On the CPU.
    """

    owner: dict[str, Any]
    name: str
    tensor: Tensor


@dataclass(frozen=True)
class _Note:
    """Stands in a graph for a visitor, or a view of one."""

    block: int
    tensor: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Visit:
    """A block's tensors on the device.

    Attributes:
        tensors: In the order of the resting ones.
        versions: Of the resting ones when they were copied: a training adapter changes them.
        ready: Set when they have arrived; None where copying waits.
    """

    tensors: list[Tensor]
    versions: list[int]
    ready: Any = None


@dataclass
class Offload:
    """The blocks of one denoiser that rest in CPU memory.

    Attributes:
        device: Where they compute.
        fetched: How often a block was copied to the device; for tests and for people who wonder.
    """

    device: torch.device
    fetched: int = 0
    _blocks: list[list[_Resting]] = field(default_factory=list)
    _visits: dict[int, _Visit] = field(default_factory=dict)
    _stream: Any = None
    _marks: deque[Any] = field(default_factory=deque)  # where the GPU was when blocks were fetched

    def __post_init__(self) -> None:
        self._ahead = self.device.type == "cuda"

    def add(self, block: nn.Module) -> None:
        """Lets a block rest. What is trained in it goes to the device and stays there."""
        number = len(self._blocks)
        self._blocks.append([resting for layer in block.modules() for resting in self._rest(layer)])
        original = block.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            with self._present(number):
                return original(*arguments, **options)

        block.forward = forward

    @property
    def resting_bytes(self) -> int:
        """Bytes in CPU memory."""
        return sum(each.tensor.numel() * each.tensor.element_size() for block in self._blocks for each in block)

    @property
    def visiting(self) -> int:
        """How many blocks are on the device now."""
        return len(self._visits)

    def _rest(self, layer: nn.Module) -> Iterator[_Resting]:
        for owner in (layer._parameters, layer._buffers):  # noqa: SLF001 where torch keeps them
            for name, tensor in owner.items():
                if tensor is None:
                    continue
                if tensor.requires_grad:
                    tensor.data = tensor.data.to(self.device)
                    continue
                tensor.data = self._pinned(tensor.data)
                yield _Resting(owner, name, tensor)

    def _pinned(self, tensor: Tensor) -> Tensor:
        resting = tensor.to("cpu")
        return resting.pin_memory() if self.device.type == "cuda" else resting

    # ------------------------------------------------------------------ while a block runs
    @contextmanager
    def _present(self, number: int) -> Iterator[None]:
        visit = self._arrive(number, number + (-1 if _goes_backward() else 1))
        for resting, tensor in zip(self._blocks[number], visit.tensors, strict=True):
            resting.owner[resting.name] = tensor
        try:
            if torch.is_grad_enabled() and not is_recomputed():
                with torch.autograd.graph.saved_tensors_hooks(*self._hooks(number, visit)):
                    yield
            else:
                yield
        finally:
            for resting in self._blocks[number]:
                resting.owner[resting.name] = resting.tensor
            self._visits.pop(number, None)

    def _hooks(self, number: int, visit: _Visit) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Replaces visitors in the graph by notes, and notes by visitors."""
        places = {
            tensor.untyped_storage().data_ptr(): (place, tensor.dtype)
            for place, tensor in enumerate(visit.tensors)
            if tensor.numel()
        }

        def pack(tensor: Tensor) -> Any:  # lives as long as the graph: it may hold no visitor
            place, dtype = places.get(tensor.untyped_storage().data_ptr(), (None, None))
            if place is None or tensor.dtype != dtype:
                return tensor
            return _Note(number, place, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        def unpack(kept: Any) -> Tensor:
            if not isinstance(kept, _Note):
                return kept  # type: ignore[no-any-return]
            visitor = self._arrive(kept.block, kept.block - 1).tensors[kept.tensor]
            return visitor.as_strided(kept.size, kept.stride, kept.offset)

        return pack, unpack

    # ------------------------------------------------------------------ coming and going
    def _arrive(self, number: int, following: int) -> _Visit:
        """The block's tensors on the device, ready; the following block is sent for where that costs no time, others leave."""
        visit = self._visits.get(number)
        for other in [each for each in self._visits if each not in (number, following)]:
            del self._visits[other]
        if visit is None or visit.versions != [each.tensor._version for each in self._blocks[number]]:  # noqa: SLF001 what in-place changes count up
            visit = self._visits[number] = self._fetch(number)
        if visit.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(visit.ready)
            for tensor in visit.tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))
        if self._ahead and 0 <= following < len(self._blocks) and following not in self._visits:
            self._visits[following] = self._fetch(following)
        return visit

    def _fetch(self, number: int) -> _Visit:
        self.fetched += 1
        block = self._blocks[number]
        versions = [each.tensor._version for each in block]  # noqa: SLF001 what in-place changes count up
        if self.device.type != "cuda":
            return _Visit([each.tensor.detach().clone() for each in block], versions)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._hold_back()
        with torch.cuda.stream(self._stream):
            tensors = [each.tensor.detach().to(self.device, non_blocking=True) for each in block]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return _Visit(tensors, versions, ready)

    def _hold_back(self) -> None:
        """Waits until the GPU has done all that it was given before the last fetch."""
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self.device))
        self._marks.append(mark)
        if len(self._marks) > 1:
            self._marks.popleft().synchronize()


def _goes_backward() -> bool:
    """Whether a backward pass runs in this thread: a block that is called in it is being computed again."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 as torch.utils.checkpoint asks it


def chosen(blocks: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """The blocks that rest: the given share of them, spread evenly."""
    return [blocks[place] for place in spread(len(blocks), share)]
