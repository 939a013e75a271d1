"""The order of training over datasets with weights: which dataset a batch is of follows the weights as closely as it can.

The n-th batch of a dataset is that of an order of its own; which dataset comes next is decided so that after any number of
batches no dataset is a whole batch away from what its weight gives it, also while weights change. That is the chairman
assignment problem, and the rule is Tijdeman's: of the datasets that have waited long enough, the one whose batch is due first.

References:
    Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32, section 3; a deadline is computed at the
    present weights. Checked in tests/unit/test_trainer_weights.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

_REMEMBERED = 256  # batches; what is asked for is a few of the newest


class Order(Protocol):
    """Batches of sample numbers by position."""

    def batch(self, position: int) -> tuple[int, ...]:
        """The sample numbers of the batch at `position`, from 0."""
        ...


class Turns:
    """Which dataset each batch is of. Every position follows from the weights alone; nothing has to be saved.

    Args:
        weights: Weights of all datasets by position, none negative, one of them above 0.
    """

    def __init__(self, weights: Callable[[int], Sequence[float]]) -> None:
        self._weights = weights
        self._begin()

    def at(self, position: int) -> tuple[int, int]:
        """(number of the dataset, how many batches of it came before)."""
        if position < self._next and position not in self._recent:
            self._begin()
        while self._next <= position:
            self._advance()
        return self._recent[position]

    def _begin(self) -> None:
        count = len(self._weights(0))
        self._next = 0
        self._taken = [0] * count
        self._due = [0.0] * count  # what the weights have given so far, less what was taken
        self._recent: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def _advance(self) -> None:
        weights = self._weights(self._next)
        total = sum(weights)
        shares = [weight / total for weight in weights]
        self._due = [due + share for due, share in zip(self._due, shares, strict=True)]
        chosen = next_turn(self._due, shares)
        self._recent[self._next] = chosen, self._taken[chosen]
        self._due[chosen] -= 1.0
        self._taken[chosen] += 1
        self._next += 1
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)


def next_turn(due: Sequence[float], shares: Sequence[float]) -> int:
    """The dataset of the next batch.

    Args:
        due: What the weights have given each dataset up to and with this batch, less what it had; in batches.
        shares: Share of each in this batch; they sum to 1. A dataset without a share is never chosen.
    """
    margin = 1.0 / max(1, 2 * len(due) - 2)
    able = [number for number, share in enumerate(shares) if share > 0.0]
    ready = [number for number in able if due[number] >= margin]
    if not ready:  # the others wait for a share
        return max(able, key=lambda number: due[number])
    return min(ready, key=lambda number: (1.0 - margin - due[number]) / shares[number])


class WeightedOrder:
    """Batches of several datasets by position, each of one dataset and one bucket.

    Args:
        orders: Of each dataset.
        turns: Which of them each batch is of.
    """

    def __init__(self, orders: Sequence[Order], turns: Turns) -> None:
        self._orders, self._turns = orders, turns

    def batch(self, position: int) -> tuple[int, ...]:
        """The sample numbers of the batch at `position`, from 0."""
        dataset, number = self._turns.at(position)
        return self._orders[dataset].batch(number)
