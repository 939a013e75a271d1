"""Everything between a watch event and a reconcile: the cache, the queue, the periodic look at all jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from lora_api.names import LABEL_JOB, LABEL_JOB_UID
from lora_operator.cache import JobCache, JobView, view_of
from lora_operator.core.views import JobKey, Manifest
from lora_operator.metrics import Metrics
from lora_operator.ports import ClusterError, RefusedError
from lora_operator.watchdog import Watchdog
from lora_operator.workqueue import WorkQueue

_log = logging.getLogger(__name__)
_RETRY_LIST_SECONDS = 5.0


class JobLister(Protocol):
    """The part of a cluster that is needed here."""

    def list_jobs(self, namespaces: Sequence[str] = ()) -> AsyncIterator[Manifest]:
        """All LoRATrainingJobs."""
        ...


class Runtime:
    """Wakes jobs and looks at them."""

    def __init__(
        self,
        lister: JobLister,
        reconcile: Callable[[JobKey], Awaitable[float | None]],
        *,
        cache: JobCache,
        metrics: Metrics,
        watchdog: Watchdog,
        namespaces: Sequence[str] = (),
        workers: int = 16,
        resync_seconds: float = 300.0,
    ) -> None:
        """A runtime that works between `start` and `stop`.

        Args:
            lister: Lists all jobs.
            reconcile: Looks at one job; returns the seconds until the next look, or None.
            cache: Views of all jobs.
            metrics: Counts.
            watchdog: Guards the tasks and is told when all jobs were seen.
            namespaces: Namespaces to serve; empty for all.
            workers: Jobs looked at at once.
            resync_seconds: Time between two looks at everything; repairs what watches missed.
        """
        self._lister = lister
        self._reconcile = reconcile
        self._cache = cache
        self._metrics = metrics
        self.watchdog = watchdog
        self._namespaces = tuple(namespaces)
        self._resync_seconds = resync_seconds
        self._queue: WorkQueue[JobKey] = WorkQueue(self._look_at, workers=workers)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to work."""
        self._tasks = [
            asyncio.create_task(self._queue.run(), name="work queue"),
            asyncio.create_task(self._relist_for_ever(), name="periodic list"),
            asyncio.create_task(self.watchdog.measure(), name="watchdog"),
        ]
        self.watchdog.guard(self._tasks)

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Begins no new look, gives those that run some time, then ends all."""
        await self._queue.stop(grace_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def saw_job(self, kind: str | None, job: Manifest) -> None:
        """A job appeared, changed or went; `kind` is the watch event's type, None for a listed one."""
        key = _key(job)
        if kind == "DELETED":
            self._cache.remove(key, job["metadata"]["uid"])
            if self._cache.get(key) is None:
                self._queue.forget(key)
            return
        before = self._cache.get(key)
        after = self._remember(key, job)
        if kind == "MODIFIED" and before is not None and (before.uid, before.wish) == (after.uid, after.wish):
            return  # a trace of our own: who writes a status has looked
        self.wake(key)

    def saw_profile(self, name: str) -> None:
        """A profile appeared, changed or went: its jobs are looked at."""
        for key in self._cache.of_profile(name):
            self.wake(key)

    def saw_pod(self, pod: Manifest) -> None:
        """A pod of ours appeared, changed or went: its job is looked at."""
        key = self._owner_of(pod)
        if key is not None:
            self.wake(key)

    def saw_child(self, child: Manifest) -> None:
        """A batch/v1 Job of ours appeared, changed or went: its job is looked at.

        So is a failed job whose child still runs: this process may have died between writing and deleting.
        """
        key = self._owner_of(child)
        if key is None:
            return
        view = self._cache.get(key)
        if view is not None and view.outcome == "Failed" and not _is_over(child):
            self._queue.wake(key)
        else:
            self.wake(key)

    def wake(self, key: JobKey) -> None:
        """Wants a look at the job, unless it is known to be finished: that costs no request."""
        view = self._cache.get(key)
        if view is None or not view.finished:
            self._queue.wake(key)

    async def relist(self) -> None:
        """Lists all jobs, wakes the unfinished and forgets the gone. Raises ClusterError."""
        before = {key: view.uid for key, view in self._cache}
        listed: set[JobKey] = set()
        async for job in self._lister.list_jobs(self._namespaces):
            key = _key(job)
            listed.add(key)
            self._remember(key, job)
            self.wake(key)
        for key, uid in before.items():
            if key not in listed:  # what was created while we listed is not in `before`
                self._cache.remove(key, uid)
        self.watchdog.ready = True

    def scrape(self) -> bytes:
        """The metrics now."""
        self._metrics.queue_waiting.set(self._queue.waiting)
        self._metrics.queue_running.set(self._queue.running)
        self._metrics.lag.set(self.watchdog.lag_seconds)
        return self._metrics.render()

    def _owner_of(self, child: Manifest) -> JobKey | None:
        metadata = child["metadata"]
        labels = metadata.get("labels") or {}
        key = self._cache.key_of(labels.get(LABEL_JOB_UID, ""))
        if key is None and LABEL_JOB in labels:
            # not seen yet; the label is the name itself wherever that fits into one
            return JobKey(metadata["namespace"], labels[LABEL_JOB])
        return key

    def _remember(self, key: JobKey, job: Manifest) -> JobView:
        before, after = self._cache.get(key), view_of(job)
        if self._cache.put(key, after) and before is not None:
            self._metrics.saw_change(before, after)
        return after

    async def _look_at(self, key: JobKey) -> float | None:
        loop = asyncio.get_running_loop()
        began, error = loop.time(), "unexpected"
        try:
            again = await self._reconcile(key)
            error = ""
        except RefusedError:
            error = "refused"
            raise
        except ClusterError:
            error = "api"
            raise
        finally:
            self._metrics.saw_reconcile(loop.time() - began, error or None)
        return again

    async def _relist_for_ever(self) -> None:
        while True:
            pause = self._resync_seconds
            try:
                await self.relist()
            except ClusterError as error:
                pause = min(_RETRY_LIST_SECONDS, self._resync_seconds)
                _log.warning("jobs can't be listed: %s; next try in %.0f s", error, pause)
            await asyncio.sleep(pause)


def _key(job: Manifest) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])


def _is_over(child: Manifest) -> bool:
    if child["metadata"].get("deletionTimestamp"):
        return True
    conditions = (child.get("status") or {}).get("conditions") or ()
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)
