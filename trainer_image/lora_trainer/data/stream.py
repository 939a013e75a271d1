"""From batch numbers to tensors on the device, prepared ahead in a thread where that pays."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from lora_trainer.data.cache import TensorCache, latents_key, mask_key, text_key
from lora_trainer.data.encode import mask_like, pixels_of
from lora_trainer.data.samples import Sample
from lora_trainer.data.weights import Order
from lora_trainer.objective import Objective

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel, Conditioning

_MEMORY_BYTES = 2 << 30
_AHEAD = 3


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass needs, on the device."""

    x_t: Tensor  # (B, C, h, w) fp32
    target: Tensor  # (B, C, h, w) fp32
    time: Tensor  # (B,) as in families.base.Corrupted
    conditioning: Conditioning
    slot: int  # of its first sample, see objective.draw
    captions: tuple[str, ...] = ()  # of the batch, where a text encoder is trained
    samples: tuple[int, ...] = ()  # their numbers
    loss_weight: Tensor | None = None  # (B,) weights of samples; None where all are 1
    delta: Tensor | None = None  # (B,) of huber losses; None where all have that of the configuration
    mask: Tensor | None = (
        None  # (B, 1, h, w), (B, 1, 1, h, w) for clips: weights of latent pixels; None where all are 1
    )


@dataclass(frozen=True)
class Share:
    """The part of each global batch that a rank trains."""

    batch_size: int  # per rank
    accumulation: int
    rank: int = 0
    world_size: int = 1
    pieces: int = 1  # in which each rank's part goes through the model, one after the other; see `lora_api.shrink`

    @property
    def passes(self) -> int:
        """Forward passes in one update."""
        return self.accumulation * self.pieces

    @property
    def global_batch(self) -> int:
        """Samples in one batch over all ranks: of one bucket, the unit of the order."""
        return self.batch_size * self.world_size

    @property
    def samples_per_step(self) -> int:
        """Samples in one update."""
        return self.global_batch * self.accumulation


class SampleReader:
    """Latents and conditions of samples, from the cache or encoded now; the most recent stay in memory."""

    def __init__(
        self, samples: Sequence[Sample], model: BaseModel, cache: TensorCache, memory_bytes: int = _MEMORY_BYTES
    ) -> None:
        self._samples, self._model, self._cache = samples, model, cache
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._memory_bytes = memory_bytes
        self._used_bytes = 0
        self._keys = [latents_key(sample, model.latents_identity) for sample in samples]
        self.masked = any(sample.mask is not None for sample in samples)
        self._mask_keys = [mask_key(s, model.latents_identity) if s.mask is not None else None for s in samples]
        self._text_keys = {
            text: text_key(text, model.text_identity) for s in samples for text in (s.caption, s.dropped_caption)
        }

    def latents(self, number: int) -> Tensor:
        """(C, h, w) fp32 on the CPU."""
        sample = self._samples[number]
        if not sample.cached:
            return self._model.encode_pixels(pixels_of(sample))
        return self._load(self._keys[number])["latents"]

    def mask(self, number: int, latents: Tensor) -> Tensor | None:
        """The mask of a sample, (1, h, w) or (1, 1, h, w), for its latents; None where all of it counts."""
        key = self._mask_keys[number]
        if key is None:
            return None
        sample = self._samples[number]
        return self._load(key)["mask"] if sample.cached else mask_like(sample, latents)

    def condition(self, number: int, drop: float) -> dict[str, Tensor]:
        """The condition of `caption`."""
        return self._load(self._text_keys[self.caption(number, drop)])

    def caption(self, number: int, drop: float) -> str:
        """A sample's caption, or its dropped one when `drop` is below its rate."""
        sample = self._samples[number]
        return sample.dropped_caption if drop < sample.dropout else sample.caption

    def _load(self, key: str) -> dict[str, Tensor]:
        found = self._memory.get(key)
        if found is not None:
            self._memory.move_to_end(key)
            return found
        found = self._cache.load(key)
        self._memory[key] = found
        self._used_bytes += _bytes(found)
        while self._used_bytes > self._memory_bytes and len(self._memory) > 1:
            _, oldest = self._memory.popitem(last=False)
            self._used_bytes -= _bytes(oldest)
        return found


class BatchMaker:
    """Makes the micro-batches of any iteration: a pure function of its number, the data and the seed."""

    def __init__(
        self,
        reader: SampleReader,
        order: Order,
        model: BaseModel,
        share: Share,
        objective: Objective,
        *,
        first_iteration: int = 0,
        sample_weights: Sequence[float] | None = None,
    ) -> None:
        self._reader, self._order, self._model, self._share = reader, order, model, share
        self._objective = objective
        self._first_iteration = first_iteration  # of the stage: its order begins there
        self._sample_weights = sample_weights

    @torch.no_grad()
    def make(self, iteration: int, micro: int) -> MicroBatch:
        """What this rank trains in the `micro`-th forward pass of an iteration: its part of a global batch, or a piece of that.

        Order and slots don't depend on the number of pieces.
        """
        share, model = self._share, self._model
        batch, piece = divmod(micro, share.pieces)
        numbers = self._order.batch((iteration - self._first_iteration) * share.accumulation + batch)
        size = share.batch_size // share.pieces
        begin = share.rank * share.batch_size + piece * size
        first, mine = batch * share.global_batch + begin, numbers[begin : begin + size]
        x0_BChw = torch.stack([self._reader.latents(number) for number in mine])
        slots = range(first, first + len(mine))
        draws = self._objective.draws(model, iteration, slots, x0_BChw.shape[1:])
        corrupted = self._objective.corrupted(model, x0_BChw, draws, iteration, slots)
        drawn = [(number, each.drop) for number, each in zip(mine, draws, strict=True)]
        return MicroBatch(
            x_t=self._to_device(corrupted.x_t),
            target=self._to_device(corrupted.target),
            time=self._to_device(corrupted.time),
            conditioning=model.collate([self._reader.condition(*each) for each in drawn]),
            slot=first,
            samples=tuple(mine),
            captions=tuple(self._reader.caption(*each) for each in drawn) if model.trained_text else (),
            loss_weight=self._to_device(self._loss_weight(mine, corrupted.time)),
            delta=self._to_device(self._objective.deltas(model, corrupted.time)),
            mask=self._to_device(self._masks(mine, x0_BChw)) if self._reader.masked else None,
        )

    def _loss_weight(self, numbers: Sequence[int], time_B: Tensor) -> Tensor | None:
        """Weights (B,) by noise level and by what a sample is for; None where all are 1."""
        by_time = self._objective.weights(self._model, time_B)
        if self._sample_weights is None:
            return by_time
        own_B = torch.tensor([self._sample_weights[number] for number in numbers], dtype=torch.float32)
        return own_B if by_time is None else own_B * by_time

    def _masks(self, numbers: Sequence[int], x0_BChw: Tensor) -> Tensor | None:
        """Masks (B, 1, h, w) or (B, 1, 1, h, w) of samples; None where none of them has one."""
        found = [self._reader.mask(number, x0) for number, x0 in zip(numbers, x0_BChw, strict=True)]
        if all(mask is None for mask in found):
            return None
        whole = torch.ones((*[1] * (x0_BChw.ndim - 3), *x0_BChw.shape[-2:]), dtype=torch.float32)
        return torch.stack([whole if mask is None else mask for mask in found])

    @overload
    def _to_device(self, tensor: Tensor) -> Tensor: ...
    @overload
    def _to_device(self, tensor: None) -> None: ...
    def _to_device(self, tensor: Tensor | None) -> Tensor | None:
        device = self._model.device
        return tensor if tensor is None or device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Batches:
    """The micro-batches of a run, in order, from an iteration on.

    With a GPU they are made ahead in a thread, while the loop waits for the device. On a CPU both would compete for the
    interpreter, and handing it over costs ten times what making a batch does: there they are made when asked for.

    Args:
        make: Makes the batch of (iteration, micro).
        first_iteration: Where to begin.
        accumulation: Micro-batches in an iteration.
        ahead: How many are kept ready; 0 is no thread.
    """

    def __init__(
        self, make: Callable[[int, int], MicroBatch], first_iteration: int, accumulation: int, ahead: int = 0
    ) -> None:
        self._make, self._numbers = make, _numbers(first_iteration, accumulation)
        self._ready: queue.Queue[MicroBatch | BaseException] = queue.Queue(maxsize=max(1, ahead))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True) if ahead else None
        if self._thread is not None:
            self._thread.start()

    def next(self) -> MicroBatch:
        """The next micro-batch.

        Raises:
            Exception: What `make` raised for it.
        """
        if self._thread is None:
            return self._make(*next(self._numbers))
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _run(self) -> None:
        for iteration, micro in self._numbers:
            if self._ended.is_set():
                return
            try:
                item: MicroBatch | BaseException = self._make(iteration, micro)
            except BaseException as error:  # noqa: BLE001 - raised again in the loop
                item = error
            self._ready.put(item)
            if isinstance(item, BaseException):
                return


def batches_ahead(device: torch.device) -> int:
    """How many micro-batches to keep ready for a device."""
    return 0 if device.type == "cpu" else _AHEAD


def _numbers(first_iteration: int, accumulation: int) -> Iterator[tuple[int, int]]:
    iteration = first_iteration
    while True:
        for micro in range(accumulation):
            yield iteration, micro
        iteration += 1


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
