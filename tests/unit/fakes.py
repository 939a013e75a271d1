"""A clock, a store and an API server that do what a test says. The other actors are in fake_kubernetes and fake_trainer."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from lora_api.profile import StoreSpec
from lora_api.store import Store, StoredObject, StoreError
from lora_operator.core.times import format_time
from lora_operator.core.views import Manifest
from tests.contract.fake_cluster import FakeCluster
from tests.unit.builders import NOW


def _copy(document: Manifest) -> Manifest:
    """A deep copy of plain data, ten times as fast as `copy.deepcopy`."""
    copied: Manifest = marshal.loads(marshal.dumps(document))
    return copied


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now: datetime = NOW) -> None:
        self._now = now

    def now(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)

    def text(self) -> str:
        return format_time(self._now)


@dataclass
class MemoryStore:
    """A store in memory; `error` makes every verb raise. Views of prefixes share everything."""

    clock: FakeClock
    prefix: str = ""
    data: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    trouble: dict[str, StoreError] = field(default_factory=dict)  # verb, or "all" -> what it raises
    calls: list[str] = field(default_factory=list)

    @property
    def location(self) -> str:
        return f"s3://runs/{self.prefix}"

    def put(self, key: str, data: bytes | memoryview | Path) -> None:
        self._called("put", key)
        assert isinstance(data, bytes)
        self.data[self.prefix + key] = (data, self.clock.now().timestamp())

    def get(self, key: str) -> bytes | None:
        self._called("get", key)
        found = self.data.get(self.prefix + key)
        return found[0] if found else None

    def fetch(self, key: str, target: Path) -> bool:
        raise NotImplementedError

    def list(self, prefix: str = "") -> list[StoredObject]:
        self._called("list", prefix)
        whole = self.prefix + prefix
        return [
            StoredObject(key.removeprefix(self.prefix), len(data), moment)
            for key, (data, moment) in sorted(self.data.items())
            if key.startswith(whole)
        ]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._called("delete", key)
            self.data.pop(self.prefix + key, None)

    def sub(self, prefix: str) -> MemoryStore:
        return MemoryStore(self.clock, f"{self.prefix}{prefix.strip('/')}/", self.data, self.trouble, self.calls)

    def _called(self, verb: str, key: str) -> None:
        self.calls.append(f"{verb} {self.prefix}{key}")
        error = self.trouble.get("all") or self.trouble.get(verb)
        if error is not None:
            raise error


@dataclass
class FakeStores:
    """Opens the one store there is."""

    store: MemoryStore
    error: StoreError | None = None

    async def open(self, spec: StoreSpec) -> Store:
        if self.error is not None:
            raise self.error
        return self.store


class SimCluster(FakeCluster):
    """The fake API server, with deletion that takes a pod's grace period and a log of what was written."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.on_status: Callable[[Manifest, Manifest], None] = lambda _before, _after: None
        self.before_write: Callable[[], None] | None = None  # another writer comes in between, once
        self.changes = 0

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        stored = self.objects.get((kind, namespace, name))
        return None if stored is None else _copy(stored)

    def of_kind(self, kind: str) -> list[Manifest]:
        return [_copy(stored) for place, stored in self.objects.items() if place[0] == kind]

    def _store(self, place: tuple[str, str, str], new: Manifest) -> Manifest:
        self.changes += 1
        stored = _copy(new)
        stored["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[place] = stored
        return _copy(stored)

    async def write_status(self, job: Manifest, status: Manifest) -> bool:
        if self.before_write is not None:
            hook, self.before_write = self.before_write, None
            hook()
        written = await super().write_status(job, status)
        if written:
            self.on_status(job, status)
        return written

    def vanish(self, kind: str, namespace: str, name: str) -> None:
        deadlines = {
            place: stored["metadata"].get("deletionTimestamp")
            for place, stored in self.objects.items()
            if place[0] == "Pod"
        }
        super().vanish(kind, namespace, name)
        self.changes += 1
        for place, deadline in deadlines.items():
            metadata = self.objects[place]["metadata"] if place in self.objects else {}
            if metadata.get("deletionTimestamp") in (None, deadline):
                continue
            del metadata["deletionTimestamp"]  # the parent's knows no clock
            if deadline is None:
                self.delete_pod(self.objects[place])
            else:
                metadata["deletionTimestamp"] = deadline

    def delete_pod(self, pod: Manifest) -> None:
        """As `kubectl delete pod`: SIGTERM now, SIGKILL after the grace period."""
        place = ("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])
        stored = self.objects[place]
        if "deletionTimestamp" not in stored["metadata"]:
            grace = stored["spec"].get("terminationGracePeriodSeconds", 30)
            moment = format_time(self.clock.now() + timedelta(seconds=grace))
            self._store(place, {**stored, "metadata": {**stored["metadata"], "deletionTimestamp": moment}})

    def touch(self, kind: str, namespace: str, name: str) -> None:
        """Another writer: nothing that matters changes, but the resourceVersion does."""
        place = (kind, namespace, name)
        self._store(place, self.objects[place])

    def save(self, manifest: Manifest) -> None:
        """Whatever a controller changed."""
        metadata = manifest["metadata"]
        self._store((manifest["kind"], metadata["namespace"], metadata["name"]), manifest)

    def create_now(self, manifest: Manifest) -> Manifest:
        """As another controller creates it."""
        return self._insert(manifest)
