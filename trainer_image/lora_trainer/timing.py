"""How long the parts of a step take, averaged between two log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class PartTimer:
    """Adds up the time of named parts; costs next to nothing while it is off.

    Args:
        every: Steps between reports; 0 is off.
        synchronise: Waits for the device, so that a part's time is its own; called only while the timer is on.
    """

    def __init__(self, every: int, synchronise: Callable[[], None] = lambda: None) -> None:
        self.every = every
        self._synchronise = synchronise
        self._seconds: dict[str, float] = {}
        self._off: AbstractContextManager[None] = nullcontext()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Times what is done inside."""
        return self._timed(name) if self.every else self._off

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._synchronise()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def report(self, step: int) -> dict[str, float] | None:
        """Mean milliseconds of each part per step, when a report is due after `step`; starts anew then."""
        if not self.every or step % self.every:
            return None
        means = {name: round(1e3 * seconds / self.every, 3) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return means
