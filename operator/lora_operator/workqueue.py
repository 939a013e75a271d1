"""A keyed work queue: each key waits once, runs once at a time, and comes back when its work asks for it.

`Schedule` decides what is due and is pure: time is an argument. `WorkQueue` runs it on an event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_operator.ports import ClusterError

Key = TypeVar("Key", bound=Hashable)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backoff:
    """Waiting time after the n-th failure in a row: doubled each time, at most the maximum, less up to a half by chance."""

    initial_seconds: float = 1.0
    max_seconds: float = 60.0
    jitter: Callable[[], float] = random.random  # numbers in [0, 1)

    def seconds(self, failures: int) -> float:
        """The wait after `failures` (1 or more) in a row; never less than half the initial time."""
        doublings = min(failures - 1, 32)
        return min(self.initial_seconds * 2.0**doublings, self.max_seconds) * (1 - self.jitter() / 2)


class Schedule(Generic[Key]):
    """Which key is due when. Of several wishes for one key the earliest wins."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []  # an entry counts only while it agrees with _due
        self._running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}
        self._order = 0

    @property
    def waiting(self) -> int:
        """Keys that are due now or later."""
        return len(self._due)

    @property
    def running(self) -> frozenset[Key]:
        """Keys whose work has begun and not ended."""
        return frozenset(self._running)

    def add(self, key: Key, at: float) -> None:
        """Wants the key's work at a time; of a key that runs, once more after it.

        A key that keeps failing is held to one try in each initial back-off, however often it is woken: what wakes it
        may be a trace of its own failing work.
        """
        at = max(at, self._not_before.get(key, at))
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        if key not in self._running:
            self._push(key, at)

    def begin(self, now: float) -> Key | None:
        """The key that has waited longest of those due, marked as running; None when none is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        self._running.add(key)
        return key

    def end(self, key: Key, now: float, again_after_seconds: float | None = None) -> None:
        """The key's work has ended well; it comes back after that time, or when it is woken."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._end(key)
        if again_after_seconds is not None:
            self.add(key, now + max(0.0, again_after_seconds))

    def fail(self, key: Key, now: float) -> float:
        """The key's work has failed; it comes back after the back-off.

        Returns:
            The seconds of the back-off.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        seconds = self._backoff.seconds(failures)
        self._not_before[key] = now + min(seconds, self._backoff.initial_seconds)
        woken = self._due.pop(key, None)
        self._end(key)
        if woken is not None:
            self.add(key, max(woken, now))
        self.add(key, now + seconds)
        return seconds

    def forget(self, key: Key) -> None:
        """The key is gone: nothing of it is kept. Work of it that runs is not stopped."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def next_at(self) -> float | None:
        """When the next key is due; None when none waits that could begin."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def _end(self, key: Key) -> None:
        self._running.discard(key)
        if key in self._due:
            self._push(key, self._due[key])

    def _push(self, key: Key, at: float) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))

    def _drop_stale(self) -> None:
        while self._heap and (self._due.get(self._heap[0][2]) != self._heap[0][0] or self._heap[0][2] in self._running):
            heapq.heappop(self._heap)


class WorkQueue(Generic[Key]):
    """Runs `work` for woken keys, at most `workers` at once, each key by one at a time."""

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = 16,
        backoff: Backoff | None = None,
        time: Callable[[], float] | None = None,
    ) -> None:
        """A queue that begins to work when `run` is awaited.

        Args:
            work: Returns the seconds until it wants to run again, or None; an exception brings it back after a back-off.
            workers: Keys worked on at once, at least 1.
            backoff: Waiting time after failures.
            time: A monotonic clock in seconds; the event loop's by default.
        """
        self._work = work
        self._workers = workers
        self._schedule: Schedule[Key] = Schedule(backoff or Backoff())
        self._time = time or (lambda: asyncio.get_running_loop().time())
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Keys that are due now or later."""
        return self._schedule.waiting

    @property
    def running(self) -> int:
        """Keys that are worked on now."""
        return len(self._schedule.running)

    def wake(self, key: Key, after_seconds: float = 0.0) -> None:
        """Wants the key's work, now or later."""
        self._schedule.add(key, self._time() + after_seconds)
        self._changed.set()

    def forget(self, key: Key) -> None:
        """The key is gone: it does not come back by itself."""
        self._schedule.forget(key)

    async def run(self) -> None:
        """Works until it is cancelled; then cancels what runs and waits for its end."""
        try:
            while not self._stopping:
                self._changed.clear()
                self._begin_what_is_due()
                await self._something_to_do()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self, grace_seconds: float) -> None:
        """Begins nothing new and gives what runs some time to end."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_seconds)
        self._changed.set()

    def _begin_what_is_due(self) -> None:
        while not self._stopping and len(self._tasks) < self._workers:
            key = self._schedule.begin(self._time())
            if key is None:
                return
            task = asyncio.create_task(self._work_on(key), name=f"work on {key}")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _something_to_do(self) -> None:
        at = self._schedule.next_at()
        full = len(self._tasks) >= self._workers
        timeout = None if at is None or full else max(0.0, at - self._time())
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return

    async def _work_on(self, key: Key) -> None:
        try:
            again = await self._work(key)
        except ClusterError as error:
            seconds = self._schedule.fail(key, self._time())
            _log.warning("%s: %s; next try in %.1f s", key, error, seconds)
        except Exception:  # noqa: BLE001 - one job's trouble must not stop the others
            seconds = self._schedule.fail(key, self._time())
            _log.exception("%s: unexpected error; next try in %.1f s", key, seconds)
        except asyncio.CancelledError:
            self._schedule.end(key, self._time())
            raise
        else:
            self._schedule.end(key, self._time(), again)
