"""Deleting a job, at every stage, with and without its run directory."""

from __future__ import annotations

import pytest

from lora_api.job import FINALIZER, KIND, ConditionType, Phase
from lora_api.store import StoreError
from tests.unit.builders import JobBuilder
from tests.unit.world import World

DOWN = StoreError("list s3://runs/team-a/mascot/: connection to <urllib3 object at 0x7f0012ab> refused")


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
@pytest.mark.parametrize("stage", ["new", "running", "backing off", "suspended", "succeeded", "invalid"])
async def test_deletion_succeeds_at_every_stage(policy: str, stage: str) -> None:
    world = World(JobBuilder().with_output(deletionPolicy=policy))
    if stage == "invalid":
        world.cluster.vanish("Secret", "team-a", "job-s3")
        await world.look()
    elif stage == "succeeded":
        await world.until_phase(Phase.SUCCEEDED)
    elif stage != "new":
        await world.until_step(150)
    if stage == "backing off":
        world.kubernetes.end_pod(world.kubernetes.pods()[0], 137)
        world.kubernetes.settle()
        await world.look()
    if stage == "suspended":
        world.edit(lambda job: job["spec"]["runPolicy"].update(suspend=True))
        await world.until_phase(Phase.SUSPENDED)
    had_data = bool(world.store.data)
    job = world.job
    assert job is not None
    protected = FINALIZER in (job["metadata"].get("finalizers") or [])
    assert protected == (policy == "Delete" and stage not in ("new", "invalid"))
    world.cluster.delete(KIND, "team-a", "mascot")
    await world.until(lambda: world.job is None)
    assert world.job is None
    await world.look()
    world.kubernetes.settle()
    assert world.job_names() == []
    assert bool(world.store.data) == (had_data and policy == "Retain")


async def test_deletion_waits_for_a_store_that_is_away_and_says_so_once() -> None:
    world = World(JobBuilder().with_output(deletionPolicy="Delete"))
    await world.until_phase(Phase.SUCCEEDED)
    world.store.trouble["all"] = DOWN
    world.cluster.delete(KIND, "team-a", "mascot")
    for _ in range(3):
        await world.tick(31)
    assert world.phase is Phase.DELETING
    assert world.condition(ConditionType.SUCCEEDED)[0] == "True", "how it ended stays true"
    assert world.reasons().count("DeleteWaits") == 1
    world.store.trouble.clear()
    await world.tick()
    assert world.job is None
    assert world.store.data == {}


async def test_deletion_does_not_wait_for_a_profile_that_is_gone() -> None:
    world = World(JobBuilder().with_output(deletionPolicy="Delete"))
    await world.until_phase(Phase.SUCCEEDED)
    world.cluster.vanish("LoRATrainingProfile", "", "default")
    world.cluster.delete(KIND, "team-a", "mascot")
    await world.until(lambda: world.job is None)
    assert "The run directory is left where it is" in world.said("RunDirectoryLeft")
    assert world.store.data != {}
