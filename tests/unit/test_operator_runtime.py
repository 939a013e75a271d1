"""Cache, runtime and metrics: from a watch event to a look at a job, and what is counted on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lora_operator.cache import JobCache, view_of
from lora_operator.core.views import JobKey, Manifest
from lora_operator.metrics import Metrics
from lora_operator.ports import ClusterError, RefusedError
from lora_operator.runtime import Runtime
from lora_operator.watchdog import Watchdog
from tests.contract.cluster_objects import a_child, a_job, a_pod, labels_of
from tests.contract.fake_cluster import FakeCluster

KEY = JobKey("team-a", "mascot")
SUCCEEDED = {"observedGeneration": 1, "phase": "Succeeded", "conditions": [{"type": "Succeeded", "status": "True"}]}
FAILED = {"observedGeneration": 1, "phase": "Failed", "conditions": [{"type": "Failed", "status": "True"}]}


def a_seen_job(status: Manifest | None = None, *, version: int = 1, uid: str = "uid-1", **metadata: Any) -> Manifest:
    """A job as a watch event brings it."""
    job = a_job()
    job["metadata"] |= {"uid": uid, "resourceVersion": str(version), "generation": 1, **metadata}
    return {**job, "status": status} if status is not None else job


class Scene:
    """A runtime whose looks are counted; `again` says when a look wants the next one."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.cache = JobCache()
        self.metrics = Metrics(self.cache)
        self.looks: Counter[JobKey] = Counter()
        self.error: Exception | None = None
        self.runtime = Runtime(
            self.cluster,
            self.look,
            cache=self.cache,
            metrics=self.metrics,
            watchdog=Watchdog(expected_watchers=0),
            resync_seconds=3600,
        )

    async def look(self, key: JobKey) -> float | None:
        self.looks[key] += 1
        if self.error is not None:
            raise self.error
        return None

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@asynccontextmanager
async def running() -> AsyncIterator[Scene]:
    scene = Scene()
    scene.runtime.start()
    await scene.settle()
    yield scene
    await scene.runtime.stop()


async def test_a_job_that_appears_is_looked_at() -> None:
    async with running() as scene:
        scene.runtime.saw_job("ADDED", a_seen_job())
        await scene.settle()
        assert scene.looks == {KEY: 1}


@pytest.mark.parametrize("status", [SUCCEEDED, FAILED])
async def test_a_finished_job_is_not_looked_at_whatever_happens_to_it(status: Manifest) -> None:
    async with running() as scene:
        scene.runtime.saw_job(None, a_seen_job(status))
        scene.runtime.saw_pod(a_pod("mascot-1-0"))
        scene.runtime.saw_profile("default")
        done = {**a_child(), "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        scene.runtime.saw_child(done)
        await scene.settle()
        assert not scene.looks


async def test_a_failed_job_whose_child_still_runs_is_looked_at() -> None:
    async with running() as scene:
        scene.runtime.saw_job(None, a_seen_job(FAILED))
        scene.runtime.saw_child(a_child())
        await scene.settle()
        assert scene.looks == {KEY: 1}


@pytest.mark.parametrize("change", [{"generation": 2}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}])
async def test_a_finished_job_whose_spec_changes_or_that_is_deleted_is_looked_at(change: dict[str, Any]) -> None:
    async with running() as scene:
        scene.runtime.saw_job("MODIFIED", a_seen_job(SUCCEEDED, **change))
        await scene.settle()
        assert scene.looks == {KEY: 1}


async def test_children_wake_the_job_that_their_uid_label_names_also_when_its_name_is_cut_in_the_label() -> None:
    async with running() as scene:
        name = "x" * 80
        scene.runtime.saw_job("ADDED", a_seen_job(name=name))
        await scene.settle()
        pod = a_pod("p")
        pod["metadata"]["labels"] = labels_of("uid-1", name="something-shortened")
        scene.runtime.saw_pod(pod)
        await scene.settle()
        assert scene.looks == {JobKey("team-a", name): 2}


async def test_a_child_of_a_job_that_was_not_seen_yet_wakes_the_name_in_its_label() -> None:
    async with running() as scene:
        scene.runtime.saw_child(a_child())
        await scene.settle()
        assert scene.looks == {KEY: 1}


async def test_what_we_write_ourselves_does_not_wake_the_job_again() -> None:
    async with running() as scene:
        scene.runtime.saw_job("ADDED", a_seen_job())
        await scene.settle()
        scene.runtime.saw_job("MODIFIED", a_seen_job({"phase": "Pending"}, version=2))
        await scene.settle()
        assert scene.looks == {KEY: 1}
        scene.runtime.saw_job("MODIFIED", a_seen_job({"phase": "Pending"}, version=3, generation=2))
        await scene.settle()
        assert scene.looks == {KEY: 2}


async def test_a_stranger_wakes_nobody() -> None:
    async with running() as scene:
        scene.runtime.saw_pod({"metadata": {"name": "x", "namespace": "team-a"}})
        await scene.settle()
        assert not scene.looks


async def test_a_profile_wakes_the_jobs_that_name_it() -> None:
    async with running() as scene:
        gold = a_seen_job(uid="uid-2", name="other")
        gold["spec"]["profile"] = "gold"
        scene.runtime.saw_job("ADDED", a_seen_job())
        scene.runtime.saw_job("ADDED", gold)
        await scene.settle()
        scene.looks.clear()
        scene.runtime.saw_profile("gold")
        await scene.settle()
        assert scene.looks == {JobKey("team-a", "other"): 1}


async def test_the_list_at_the_start_wakes_all_and_makes_the_process_ready() -> None:
    scene = Scene()
    scene.cluster.apply(a_job())
    assert not scene.runtime.watchdog.ready
    scene.runtime.start()
    await scene.settle()
    assert scene.runtime.watchdog.ready
    assert scene.looks == {KEY: 1}
    await scene.runtime.stop()


async def test_a_list_that_fails_is_tried_again_and_does_not_make_the_process_ready() -> None:
    scene = Scene()
    scene.cluster.fail("list_jobs")
    scene.runtime.start()
    await scene.settle()
    assert not scene.runtime.watchdog.ready
    assert scene.runtime.watchdog.problems() == []
    await scene.runtime.stop()


async def test_a_list_forgets_jobs_whose_deletion_no_watch_told() -> None:
    async with running() as scene:
        scene.runtime.saw_job("ADDED", a_seen_job())
        assert scene.cache.get(KEY) is not None
        await scene.runtime.relist()
        assert scene.cache.get(KEY) is None
        assert scene.cache.key_of("uid-1") is None


async def test_a_job_that_is_deleted_and_made_anew_is_not_mixed_up_with_its_former_self() -> None:
    async with running() as scene:
        scene.runtime.saw_job("ADDED", a_seen_job(SUCCEEDED, uid="old"))
        scene.runtime.saw_job("ADDED", a_seen_job(uid="new", version=2))
        scene.runtime.saw_job("DELETED", a_seen_job(SUCCEEDED, uid="old", version=3))
        await scene.settle()
        assert scene.cache.key_of("new") == KEY
        assert scene.cache.key_of("old") is None
        assert scene.looks == {KEY: 1}


def test_an_older_view_does_not_replace_a_newer_one_of_the_same_object() -> None:
    cache = JobCache()
    assert cache.put(KEY, view_of(a_seen_job(version=10)))
    assert not cache.put(KEY, view_of(a_seen_job(SUCCEEDED, version=9)))
    view = cache.get(KEY)
    assert view is not None
    assert not view.finished


@pytest.mark.parametrize(
    "status",
    [{"conditions": None}, {"conditions": ["x"]}, {"progress": {"step": "many"}, "restarts": []}, {"conditions": [{}]}],
)
def test_a_status_that_makes_no_sense_counts_as_none(status: Manifest) -> None:
    view = view_of(a_seen_job(status))
    assert (view.finished, view.step, view.restarts) == (False, 0, {})


async def test_what_happens_to_jobs_is_counted_once_whatever_the_order_of_events() -> None:
    async with running() as scene:
        before = {
            "restarts": {"preemption": 1, "failure": 0},
            "checkpoints": {"removed": 2, "count": 3},
            "lostSteps": 5,
        }
        after = {
            "restarts": {"preemption": 2, "outOfMemory": 1},
            "checkpoints": {"removed": 4, "count": 3},
            "lostSteps": 9,
        }
        scene.runtime.saw_job(None, a_seen_job(before, version=1))
        scene.runtime.saw_job("MODIFIED", a_seen_job(after, version=2))
        scene.runtime.saw_job("MODIFIED", a_seen_job(before, version=1))
        scene.runtime.saw_job("MODIFIED", a_seen_job(after, version=2))
        assert scene.sample("lora_operator_restarts_total", cause="preemption") == 1
        assert scene.sample("lora_operator_restarts_total", cause="out_of_memory") == 1
        assert scene.sample("lora_operator_restarts_total", cause="failure") == 0
        assert scene.sample("lora_operator_checkpoints_removed_total") == 2
        assert scene.sample("lora_operator_lost_steps_total") == 4
        assert scene.sample("lora_operator_checkpoints") == 3


async def test_looks_and_their_errors_are_counted_by_kind() -> None:
    scene = Scene()
    for error in (None, ClusterError("x"), RefusedError("x"), ValueError("x")):
        scene.error = error
        with pytest.raises(type(error)) if error else _nothing():
            await scene.runtime._look_at(KEY)
    assert scene.sample("lora_operator_reconcile_duration_seconds_count", result="ok") == 1
    assert scene.sample("lora_operator_reconcile_duration_seconds_count", result="error") == 3
    for kind in ("api", "refused", "unexpected"):
        assert scene.sample("lora_operator_reconcile_errors_total", kind=kind) == 1


class _nothing:  # noqa: N801 - reads as a context
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
