"""One suite for the cluster port: the fake that unit tests use and the real adapter on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from lora_operator.core.views import Event, EventType, JobKey, Manifest
from tests.contract.cluster_objects import (
    NAMESPACE,
    a_child,
    a_companion,
    a_job,
    a_pod,
    a_profile,
    a_secret,
    a_warning,
    key_of,
)
from tests.contract.cluster_worlds import FakeWorld, World

Found = TypeVar("Found")


@pytest.fixture(params=["fake", "kubernetes"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "fake":
        return FakeWorld()
    real: World = request.getfixturevalue("real")
    return real


async def soon(read: Callable[[], Awaitable[Found]], fits: Callable[[Found], bool]) -> Found:
    """What comes from the server's cache may be some milliseconds old."""
    async with asyncio.timeout(5):
        while not fits(found := await read()):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    return found


async def test_a_job_is_read_as_it_is_and_as_none_when_it_is_not_there(world: World) -> None:
    made = world.seed(a_job())
    read = await world.cluster.read_job(key_of(made))
    assert read is not None
    assert (read["kind"], read["metadata"]["uid"]) == ("LoRATrainingJob", made["metadata"]["uid"])
    assert await world.cluster.read_job(JobKey(NAMESPACE, "other")) is None


async def test_a_profile_is_read_by_name(world: World) -> None:
    world.seed(a_profile("gold"))
    read = await soon(lambda: world.cluster.read_profile("gold"), lambda found: found is not None)
    assert read is not None
    assert read["spec"]["trainer"]["image"] == "lora-trainer:test"
    assert await world.cluster.read_profile("silver") is None


async def test_of_a_secret_only_the_keys_are_told(world: World) -> None:
    world.seed(a_secret("store", accessKey="a", other="b"))
    keys = await soon(lambda: world.cluster.secret_keys(NAMESPACE, "store"), lambda found: found is not None)
    assert keys == {"accessKey", "other"}
    assert await world.cluster.secret_keys("team-b", "store") is None


async def test_children_and_pods_are_found_by_the_uid_of_their_job_in_its_namespace_only(world: World) -> None:
    world.seed(a_child("mascot-1", "uid-1"))
    world.seed(a_child("mascot-2", "uid-1"))
    world.seed(a_child("other-1", "uid-2"))
    world.seed(a_child("mascot-1", "uid-1", namespace="team-b"))
    world.seed(a_pod("mascot-1-0-x", "uid-1", attempt=1))
    world.seed(a_pod("mascot-2-0-x", "uid-1", attempt=2))
    world.seed(a_pod("other-1-0-x", "uid-2"))
    key = JobKey(NAMESPACE, "mascot")
    children = await soon(lambda: world.cluster.read_children(key, "uid-1"), lambda found: len(found) == 2)
    pods = await soon(lambda: world.cluster.read_pods(key, "uid-1"), lambda found: len(found) == 2)
    assert sorted(child["metadata"]["name"] for child in children) == ["mascot-1", "mascot-2"]
    assert {(child["apiVersion"], child["kind"]) for child in children} == {("batch/v1", "Job")}
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["mascot-1-0-x", "mascot-2-0-x"]
    assert await world.cluster.read_children(key, "uid-3") == []


async def test_a_child_is_read_by_name_whoever_owns_it(world: World) -> None:
    foreign = a_child()
    foreign["metadata"]["labels"] = {}
    world.seed(foreign)
    read = await world.cluster.read_child(NAMESPACE, "mascot-1")
    assert read is not None
    assert read["metadata"]["name"] == "mascot-1"
    assert await world.cluster.read_child(NAMESPACE, "mascot-2") is None


@pytest.mark.parametrize("manifest", [a_child(), a_companion("Service"), a_companion("ConfigMap")])
async def test_an_object_is_created_once_and_its_second_creation_changes_nothing(
    world: World, manifest: Manifest
) -> None:
    assert await world.cluster.create(manifest) is True
    made = world.fetch(manifest["kind"], NAMESPACE, "mascot-1")
    assert await world.cluster.create(manifest) is False
    assert world.fetch(manifest["kind"], NAMESPACE, "mascot-1") == made


async def test_deleting_a_child_takes_its_service_and_config_map_with_it(world: World) -> None:
    for manifest in (a_companion("ConfigMap"), a_companion("Service"), a_child()):
        await world.cluster.create(manifest)
    job = world.fetch("Job", NAMESPACE, "mascot-1")
    assert job is not None
    await world.cluster.delete_child(NAMESPACE, "mascot-1", job["metadata"]["uid"])
    for kind in ("Job", "Service", "ConfigMap"):
        assert world.fetch(kind, NAMESPACE, "mascot-1") is None
    # what is gone may be deleted again: the process may have died in between
    await world.cluster.delete_child(NAMESPACE, "mascot-1", job["metadata"]["uid"])


async def test_a_child_of_another_uid_stays_and_so_does_what_goes_with_it(world: World) -> None:
    for manifest in (a_companion("ConfigMap"), a_companion("Service"), a_child()):
        await world.cluster.create(manifest)
    await world.cluster.delete_child(NAMESPACE, "mascot-1", "00000000-0000-0000-0000-0000000000ff")
    for kind in ("Job", "Service", "ConfigMap"):
        assert world.fetch(kind, NAMESPACE, "mascot-1") is not None


async def test_leftovers_of_a_child_that_is_gone_are_deleted(world: World) -> None:
    await world.cluster.create(a_companion("Service"))
    await world.cluster.delete_child(NAMESPACE, "mascot-1", "uid-of-the-gone-child")
    assert world.fetch("Service", NAMESPACE, "mascot-1") is None


async def test_a_config_map_of_that_name_that_is_not_ours_stays(world: World) -> None:
    foreign, another = a_companion("ConfigMap"), a_companion("Service", uid="uid-2")
    foreign["metadata"]["labels"] = {"app": "theirs"}
    world.seed(foreign)
    world.seed(another)
    await world.cluster.create(a_child())
    job = world.fetch("Job", NAMESPACE, "mascot-1")
    assert job is not None
    await world.cluster.delete_child(NAMESPACE, "mascot-1", job["metadata"]["uid"])
    assert world.fetch("ConfigMap", NAMESPACE, "mascot-1") is not None
    assert world.fetch("Service", NAMESPACE, "mascot-1") is not None, "it has the label of another job"


async def test_the_whole_status_is_replaced_and_nothing_else(world: World) -> None:
    made = world.seed(a_job())
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert await world.cluster.write_status(job, {"phase": "Pending", "attempt": 1, "childName": "mascot-1"})
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert await world.cluster.write_status(job, {"phase": "Running", "attempt": 2})
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert (job["status"]["phase"], job["status"]["attempt"]) == ("Running", 2)
    assert "childName" not in job["status"]
    assert job["spec"] == made["spec"]
    assert job["metadata"]["generation"] == made["metadata"]["generation"]


async def test_a_status_based_on_an_old_version_is_not_written(world: World) -> None:
    made = world.seed(a_job())
    old = await world.cluster.read_job(key_of(made))
    assert old is not None
    assert await world.cluster.write_status(old, {"attempt": 1}) is True
    assert await world.cluster.write_status(old, {"attempt": 2}) is False
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert job["status"]["attempt"] == 1


async def test_a_status_of_a_job_that_is_gone_or_made_anew_is_not_written(world: World) -> None:
    made = world.seed(a_job())
    old = await world.cluster.read_job(key_of(made))
    assert old is not None
    world.remove("LoRATrainingJob", NAMESPACE, "mascot")
    assert await world.cluster.write_status(old, {"attempt": 1}) is False
    world.seed(a_job())
    assert await world.cluster.write_status(old, {"attempt": 1}) is False
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert not (job.get("status") or {}).get("attempt")


async def test_finalizers_hold_a_job_until_they_are_taken_away(world: World) -> None:
    made = world.seed(a_job())
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert await world.cluster.write_finalizers(job, ("lora-operator.io/run-directory",)) is True
    assert await world.cluster.write_finalizers(job, ()) is False, "it was written since"
    world.remove("LoRATrainingJob", NAMESPACE, "mascot")
    job = await world.cluster.read_job(key_of(made))
    assert job is not None
    assert job["metadata"]["deletionTimestamp"]
    assert await world.cluster.write_finalizers(job, ()) is True
    assert await world.cluster.read_job(key_of(made)) is None
    assert await world.cluster.write_finalizers(job, ()) is False


@pytest.mark.parametrize("pods", [1, 6])
async def test_the_newest_warning_of_each_pod_is_told_in_the_order_asked(world: World, pods: int) -> None:
    asked = [f"pod-{index}" for index in reversed(range(pods))]
    for name in [*asked, "stranger"]:
        world.seed(a_warning(name, "FailedMount", "secret not found", "2026-01-01T10:00:00Z"))
        world.seed(a_warning(name, "FailedScheduling", f"no node for {name}", "2026-01-01T11:00:00Z"))
    world.seed({**a_warning(asked[0], "Pulled", "fine", "2026-01-01T12:00:00Z"), "type": "Normal"})
    texts = await world.cluster.read_warnings(NAMESPACE, [*asked, "silent"])
    assert texts == [f"FailedScheduling: no node for {name}" for name in asked]


async def test_emitting_never_raises_even_when_the_job_is_nonsense(world: World) -> None:
    await world.cluster.emit(
        {"apiVersion": "x", "kind": "y", "metadata": {"name": "n", "namespace": "no-such-namespace", "uid": "u"}},
        Event(EventType.NORMAL, "Reason", "text"),
    )
