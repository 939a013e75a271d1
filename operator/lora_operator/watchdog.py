"""Finds what would leave a live process that does nothing: dead watchers, dead tasks, an event loop that is stuck.

kopf ends the watcher of a resource for good when the API server answers a watch with an error it doesn't know, and goes
on as if nothing had happened. Only a new process helps, so the liveness probe has to say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)
_WATCHER = "watcher for "  # how kopf names its tasks, one for each resource and namespace


def watcher_tasks() -> frozenset[str]:
    """Names of kopf's watchers that run now."""
    return frozenset(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(_WATCHER))


class Watchdog:
    """Says what is wrong with this process."""

    def __init__(
        self,
        *,
        expected_watchers: int,
        watchers: Callable[[], frozenset[str]] = watcher_tasks,
        startup_seconds: float = 60.0,
        max_lag_seconds: float = 10.0,
        time: Callable[[], float] | None = None,
    ) -> None:
        """A watchdog whose start-up time begins now.

        Args:
            expected_watchers: How many watchers there have to be once the process has started.
            watchers: Names of the watchers that run.
            startup_seconds: Time for all watchers to appear.
            max_lag_seconds: How late the event loop may be.
            time: A monotonic clock in seconds; the event loop's by default.
        """
        self._expected = expected_watchers
        self._watchers = watchers
        self._time = time or (lambda: asyncio.get_running_loop().time())
        self._max_lag = max_lag_seconds
        self._deadline: float | None = None
        self._startup_seconds = startup_seconds
        self._seen: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.lag_seconds = 0.0
        self.ready = False  # every job has been seen once

    def guard(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Tasks of our own that never end."""
        self._tasks.update({task.get_name(): task for task in tasks})

    def problems(self) -> list[str]:
        """One sentence for each thing that only a restart repairs; empty when all is well."""
        now = self._time()
        if self._deadline is None:
            self._deadline = now + self._startup_seconds
        alive = self._watchers()
        self._seen |= alive
        found = [f"{name} has ended" for name in sorted(self._seen - alive)]
        if len(self._seen) < self._expected and now > self._deadline:
            found.append(f"{len(self._seen)} of {self._expected} watchers have started")
        found += [f"task {name} has ended" for name, task in self._tasks.items() if task.done()]
        if self.lag_seconds > self._max_lag:
            found.append(f"the event loop is {self.lag_seconds:.1f} s late")
        return found

    async def measure(self, interval_seconds: float = 1.0) -> None:
        """Measures how late the event loop wakes a sleeper, and notes which watchers run; until cancelled."""
        while True:
            began = self._time()
            await asyncio.sleep(interval_seconds)
            self.lag_seconds = max(0.0, self._time() - began - interval_seconds)
            for problem in self.problems():
                _log.error("unhealthy: %s; the liveness probe fails until this process is restarted", problem)
