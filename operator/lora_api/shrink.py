"""What "smaller" means after device memory ran out: the same samples in each step, fewer of them in memory at once.

A run is made smaller in steps, each after one more end for want of memory: every micro-batch goes through the model in
more, equal pieces until they hold one sample; then activations are recomputed. How often that was done is one number, so
that operator and trainer mean the same by it, and it stands beside the configuration, never in it: what is trained, in
which order and with which noise, stays what `config_hash` names. See operator/decisions/0011.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_api.training import TrainConfig


@dataclass(frozen=True)
class Passes:
    """How the samples of a step go through the model on each process."""

    batch_size: int  # samples in one forward pass
    gradient_accumulation: int  # forward passes in one step
    gradient_checkpointing: bool

    def __str__(self) -> str:
        """In the words of the configuration."""
        recomputed = ", gradient_checkpointing" if self.gradient_checkpointing else ""
        return f"batch_size {self.batch_size} x gradient_accumulation {self.gradient_accumulation}{recomputed}"


def piece_size(batch_size: int, times: int) -> int:
    """Samples that go through the model at once after memory ran out `times` times.

    Each time the largest equal share of what it was before: half of an even number, a third of an odd multiple of three, ...
    So 12 becomes 6, 3, 1.
    """
    for _ in range(times):
        batch_size //= _smallest_factor(batch_size)
    return batch_size


def passes(train: TrainConfig, times: int) -> Passes:
    """How a configuration is trained after memory ran out `times` times; 0 is as it says.

    With stages, each of them is made smaller; this tells of the one with the largest forward pass.
    """
    recomputed = train.gradient_checkpointing or times > _divisions(train)
    each = [
        Passes(size, accumulation * (batch_size // size), recomputed)
        for batch_size, accumulation in _batches(train)
        for size in [piece_size(batch_size, times)]
    ]
    return max(each, key=lambda one: one.batch_size)


def can_shrink(train: TrainConfig, times: int) -> bool:
    """Whether there is something left to make smaller after that was done `times` times."""
    return times < _divisions(train) + (0 if train.gradient_checkpointing else 1)


def _batches(train: TrainConfig) -> list[tuple[int, int]]:
    """Batch size and accumulation of each stage, or of the run."""
    if not train.stages:
        return [(train.batch_size, train.gradient_accumulation)]
    return [
        (stage.batch_size or train.batch_size, stage.gradient_accumulation or train.gradient_accumulation)
        for stage in train.stages
    ]


def _divisions(train: TrainConfig) -> int:
    """How often batches can be divided until all hold one sample: the most prime factors that one of them has."""
    return max(_factors(batch_size) for batch_size, _ in _batches(train))


def _factors(number: int) -> int:
    """The number of its prime factors."""
    count = 0
    while number > 1:
        number, count = piece_size(number, 1), count + 1
    return count


def _smallest_factor(number: int) -> int:
    """The smallest prime factor; 1 has none and is its own."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)
