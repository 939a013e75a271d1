"""An operator may die after any of its writes: the next one brings every job to the same end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lora_api import layout
from lora_api.job import KIND
from lora_operator.core.conditions import is_terminal
from lora_operator.core.read import read_status
from lora_operator.core.views import Manifest
from tests.unit.builders import JobBuilder, word
from tests.unit.world import CrashError, World

Disturbance = Callable[[World], Any]


def preempt(world: World) -> None:
    for pod in world.kubernetes.pods():
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
            world.kubernetes.disrupt(pod, "preempted")


def kill(world: World) -> None:
    for pod in world.kubernetes.pods():
        if pod["status"]["phase"] == "Running":
            world.kubernetes.end_pod(pod, 137)


def run_out_of_memory(world: World) -> None:
    for pod in world.kubernetes.pods():
        if pod["status"]["phase"] == "Running":
            world.kubernetes.end_pod(pod, 86, word(86, "CUDA out of memory", reason="OutOfDeviceMemory"))


def hang(world: World) -> None:
    world.trainer.hangs = True
    world.clock.advance(700)


def suspend(value: bool) -> Disturbance:
    return lambda world: world.edit(lambda job: job["spec"]["runPolicy"].update(suspend=value))


def delete(world: World) -> None:
    world.cluster.delete(KIND, "team-a", "mascot")


def delete_child(world: World) -> None:
    for job in world.kubernetes.jobs():
        world.cluster.delete("Job", "team-a", job["metadata"]["name"])


STORIES: dict[str, tuple[JobBuilder, dict[int, Disturbance]]] = {
    "undisturbed": (JobBuilder().with_config("save", max_step_saves=1), {}),
    "preempted twice": (JobBuilder(), {3: preempt, 6: preempt}),
    "killed": (JobBuilder(), {3: kill}),
    "killed without retries": (JobBuilder().with_policy(backoffLimit=0), {3: kill}),
    "does not fit twice": (
        JobBuilder().with_config("train", batch_size=4),
        {3: run_out_of_memory, 6: run_out_of_memory},
    ),
    "does not fit at all": (JobBuilder(), {3: run_out_of_memory, 6: run_out_of_memory}),
    "hangs at its limit": (JobBuilder().with_policy(backoffLimit=0), {3: hang}),
    "suspended and resumed": (JobBuilder(), {3: suspend(True), 6: suspend(False)}),
    "its child is deleted": (JobBuilder(), {3: delete_child}),
    "deleted with its data": (JobBuilder().with_output(deletionPolicy="Delete"), {3: delete}),
}


async def play(name: str, crash_after: int | None = None) -> tuple[World, list[str]]:
    """The story, ticked to its end; and the names of all child Jobs there ever were."""
    job, disturbances = STORIES[name]
    world = World(job, crash_after=crash_after)
    world.trainer.stride = 100
    created: list[str] = []
    inner = world.cluster.create

    async def create(manifest: Manifest) -> bool:
        done = await inner(manifest)
        if done and manifest["kind"] == "Job":
            created.append(manifest["metadata"]["name"])
        return done

    world.cluster.create = create  # type: ignore[method-assign]
    for tick in range(26):
        if tick in disturbances:
            disturbances[tick](world)
        world.kubernetes.settle()
        world.trainer.move()
        world.kubernetes.settle()
        world.clock.advance(11)
        try:
            await world.look()
        except CrashError:
            world.restart()
            await world.look()
        if world.job is None or (is_terminal(world.status) and tick > max(disturbances, default=0)):
            break
    return world, created


def end_of(world: World) -> tuple[Any, ...]:
    """What must not depend on crashes."""
    job = world.job
    if job is None:
        return ("gone", dict(world.store.data))
    status = read_status(job)
    kinds = {condition.type: condition.status for condition in status.conditions}
    reasons = {condition.reason for condition in status.conditions if condition.status == "True"}
    return (
        status.phase,
        status.attempt,
        status.restarts,
        status.shrunk,
        kinds,
        reasons,
        status.checkpoints.count,
        status.checkpoints.removed,
    )


@pytest.mark.parametrize("name", STORIES)
async def test_a_crash_after_any_write_leads_to_the_same_end(name: str) -> None:
    calm, created = await play(name)
    assert len(created) == len(set(created)), "no Job is made twice"
    for after in range(1, calm.fuse.burned + 1):
        world, created_here = await play(name, crash_after=after)
        assert world.fuse.burned >= after, "the crash has happened"
        assert end_of(world) == end_of(calm), f"crash after write {after}"
        assert created_here == created, f"crash after write {after}"
        assert len({*world.reasons()} - {*calm.reasons()}) == 0
        for reason in ("Succeeded", "Failed", "Interrupted", "Shrunk", "Suspended"):
            assert world.reasons().count(reason) <= calm.reasons().count(reason), (after, reason)


async def test_deleting_with_data_leaves_nothing_of_the_job_and_everything_of_its_neighbour() -> None:
    world, _ = await play("deleted with its data")
    assert world.job is None
    assert world.store.data == {}


async def test_a_neighbour_with_a_longer_name_keeps_its_data() -> None:
    world = World(JobBuilder().with_output(deletionPolicy="Delete", path="team-a/lora"))
    world.store.put("team-a/lora-2/" + layout.RUN_FILE, b"{}")
    await world.until_step(150)
    delete(world)
    await world.until(lambda: world.job is None)
    assert list(world.store.data) == ["team-a/lora-2/run.json"]
