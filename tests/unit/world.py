"""The small world with an operator in it, and what must be true after every write of a status."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lora_api.job import KIND, ConditionType, JobStatus, Phase
from lora_operator.core.conditions import condition_of, holds, is_terminal
from lora_operator.core.read import read_status
from lora_operator.core.views import Event, JobKey, Manifest
from lora_operator.reconciler import Reconciler
from tests.unit.builders import JobBuilder, ProfileBuilder
from tests.unit.fake_kubernetes import Kubernetes
from tests.unit.fake_trainer import Trainer
from tests.unit.fakes import FakeClock, FakeStores, MemoryStore, SimCluster

KEY = JobKey("team-a", "mascot")
STATES = (
    ConditionType.QUEUED,
    ConditionType.RUNNING,
    ConditionType.SUSPENDED,
    ConditionType.INTERRUPTED,
    ConditionType.SUCCEEDED,
    ConditionType.FAILED,
)


class CrashError(Exception):
    """The operator's process has ended."""


WRITES = {"create", "delete_child", "write_status", "write_finalizers", "emit", "put", "delete"}


class Mortal:
    """Everything an operator calls, until it dies after its k-th write."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self._inner, self._fuse = inner, fuse

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        if inspect.iscoroutinefunction(value):

            async def call(*arguments: Any) -> Any:
                result = await value(*arguments)
                self._fuse.burn(name)
                return self._wrapped(result)

            return call

        def call_now(*arguments: Any) -> Any:
            result = value(*arguments)
            self._fuse.burn(name)
            return self._wrapped(result)

        return call_now

    def _wrapped(self, result: Any) -> Any:
        return Mortal(result, self._fuse) if isinstance(result, MemoryStore) else result


class Fuse:
    """Burns down once."""

    def __init__(self, calls: int | None = None) -> None:
        self.calls, self.burned = calls, 0

    def burn(self, call: str) -> None:
        self.burned += call in WRITES
        if call in WRITES and self.burned == self.calls:
            raise CrashError


class World:
    """One job in one cluster."""

    def __init__(
        self, job: JobBuilder | None = None, profile: ProfileBuilder | None = None, *, crash_after: int | None = None
    ) -> None:
        self.clock = FakeClock()
        self.cluster = SimCluster(self.clock)
        self.cluster.on_status = self._check
        self.kubernetes = Kubernetes(self.cluster, self.clock)
        self.store = MemoryStore(self.clock)
        self.stores = FakeStores(self.store)
        manifest = (job or JobBuilder()).manifest()
        self.cluster.apply((profile or ProfileBuilder()).manifest())
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "job-s3", "namespace": "team-a"},
                "stringData": {"accessKey": "a", "secretKey": "s"},
            }
        )
        self.key = JobKey("team-a", manifest["metadata"]["name"])
        for field in ("uid", "generation", "resourceVersion"):
            manifest["metadata"].pop(field)
        self.manifest = manifest
        applied = self.cluster.apply(manifest)
        path = manifest["spec"].get("output", {}).get("path", f"team-a/{self.key.name}")
        self.trainer = Trainer(
            self.store.sub(path), self.kubernetes, self.clock, uid=applied["metadata"]["uid"], steps=300
        )
        self.fuse = Fuse(crash_after)
        self.writes = 0
        self.attempts: list[int] = []
        self.wait: float | None = 0.0
        self.restart()

    def restart(self) -> None:
        """A new process: nothing is remembered."""
        cluster, stores = Mortal(self.cluster, self.fuse), Mortal(self.stores, self.fuse)
        self.reconciler = Reconciler(cluster, stores, self.clock)

    # what is seen

    @property
    def job(self) -> Manifest | None:
        return self.cluster.get(KIND, self.key.namespace, self.key.name)

    @property
    def status(self) -> JobStatus:
        job = self.job
        assert job is not None
        return read_status(job)

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.cluster.events]

    @property
    def phase(self) -> Phase:
        return self.status.phase

    def reasons(self) -> list[str]:
        """Reasons of all events so far, in order."""
        return [event.reason for event in self.events]

    def said(self, reason: str) -> str:
        """The message of the last event of that reason."""
        return [event.message for event in self.events if event.reason == reason][-1]

    def condition(self, kind: ConditionType) -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        found = condition_of(self.status, kind)
        assert found is not None, kind
        return found.status, found.reason, found.message

    def job_names(self) -> list[str]:
        """Names of the child Jobs that exist."""
        return sorted(job["metadata"]["name"] for job in self.kubernetes.jobs())

    # what is done

    def edit(self, change: Callable[[Manifest], Any]) -> None:
        """The user edits the manifest and applies it again."""
        change(self.manifest)
        self.cluster.apply(self.manifest)

    async def look(self) -> float | None:
        """The operator looks once, and a second time to prove that it is at rest: that one writes nothing."""
        self.wait = await self.reconciler.reconcile(self.key)
        while self.wait is not None and self.wait < 0.05:
            self.wait = await self.reconciler.reconcile(self.key)
        return self.wait

    async def look_and_rest(self) -> float | None:
        """`look`, then nothing has changed: another look may write nothing, say nothing, change nothing in the store."""
        wait = await self.look()
        before, written, said, stored = self.job, self.writes, len(self.events), dict(self.store.data)
        await self.reconciler.reconcile(self.key)
        assert self.job == before, differences(before, self.job)
        assert (self.writes, len(self.events)) == (written, said), self.events[said:]
        assert self.store.data == stored
        return wait

    async def tick(self, seconds: float = 11.0) -> None:
        """Everybody moves once: controllers, trainer, controllers, operator."""
        self.kubernetes.settle()
        self.trainer.move()
        self.kubernetes.settle()
        self.clock.advance(seconds)
        await self.look_and_rest()

    async def until(self, condition: Callable[[], bool], *, ticks: int = 40) -> None:
        """Ticks until something is so."""
        for _ in range(ticks):
            if self.job is None or condition():
                break
            await self.tick()
        assert self.job is None or condition(), f"not within {ticks} ticks: {self.status}"

    async def until_phase(self, phase: Phase, *, ticks: int = 40) -> None:
        await self.until(lambda: self.status.phase is phase, ticks=ticks)

    async def until_step(self, step: int) -> None:
        await self.until(lambda: self.status.progress is not None and self.status.progress.step >= step)

    # what must be true

    def _check(self, before: Manifest, wire: Manifest) -> None:
        self.writes += 1
        status = read_status({"status": wire})
        assert status.conditions, "a status says something"
        assert status.observed_generation == before["metadata"]["generation"]
        true = [kind for kind in STATES if holds(status, kind)]
        assert len(true) <= 1, f"a job is in one state, not in {true}"
        assert holds(status, ConditionType.READY) == holds(status, ConditionType.SUCCEEDED)
        assert _phase_agrees(status, true), (status.phase, true)
        assert len(status.model_dump_json(by_alias=True, exclude_none=True).encode()) < 8192
        assert status.restarts_total == status.restarts.total
        assert all(len(condition.message) <= 512 for condition in status.conditions)
        assert all(condition.message.count(" — ") <= 1 for condition in status.conditions)
        self._check_against(read_status(before), status)
        if not self.attempts or self.attempts[-1] != status.attempt:
            self.attempts.append(status.attempt)

    def _check_against(self, old: JobStatus, new: JobStatus) -> None:
        for condition in new.conditions:
            known = condition_of(old, condition.type)
            if known is not None:
                flipped = known.status != condition.status
                same_time = known.last_transition_time == condition.last_transition_time
                assert flipped or same_time, f"{condition.type} did not flip, but its time moved"
        assert 0 <= new.attempt - old.attempt <= 1, "attempts are counted one by one"
        for field in ("preemption", "failure", "out_of_memory", "infrastructure"):
            assert getattr(new.restarts, field) >= getattr(old.restarts, field), "counts are never lost"
        assert new.restarts.total - old.restarts.total <= 1
        assert (new.shrunk.times if new.shrunk else 0) >= (old.shrunk.times if old.shrunk else 0), (
            "it does not grow back"
        )
        assert old == JobStatus() or old != new, "a write changes something"
        if is_terminal(old):
            assert holds(old, ConditionType.SUCCEEDED) == holds(new, ConditionType.SUCCEEDED)
            assert holds(old, ConditionType.FAILED) == holds(new, ConditionType.FAILED)


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Where two documents differ, for people."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = {**before, **after}
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{path}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}[{index}]")]
    return [] if before == after else [f"{path}: {before} -> {after}"]


def _phase_agrees(status: JobStatus, true: list[ConditionType]) -> bool:
    if status.phase is Phase.DELETING:
        return True
    if not true:
        return status.phase in (Phase.PENDING, Phase.INVALID)
    return status.phase.value == true[0].value
