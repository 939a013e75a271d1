"""Stores, buckets, Secrets and profiles that are away for a while, at every stage of a job."""

from __future__ import annotations

import pytest

from lora_api.job import ConditionType, Phase
from lora_api.store import StoreCredentialsError, StoreError, StoreMissingError
from tests.unit.builders import JobBuilder, ProfileBuilder
from tests.unit.world import World

DOWN = StoreError("list s3://runs/team-a/mascot/: connection to <urllib3 object at 0x7f0012ab> refused")


async def test_a_store_that_is_away_at_first_is_waited_for() -> None:
    world = World()
    world.store.trouble["all"] = DOWN
    assert await world.look_and_rest() == 5.0
    assert world.condition(ConditionType.ACCEPTED)[0] == "Unknown"
    assert "0x7f00" not in world.condition(ConditionType.ACCEPTED)[2]
    world.store.trouble.clear()
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_store_that_is_away_while_a_job_runs_changes_neither_stage_nor_step_nor_attempt() -> None:
    world = World()
    await world.until_step(100)
    before = world.status
    world.store.trouble["all"] = DOWN
    world.clock.advance(11)
    await world.look_and_rest()
    assert (world.status.phase, world.status.stage) == (Phase.RUNNING, "Training")
    assert world.status.progress == before.progress
    assert "the store can't be reached" in world.condition(ConditionType.RUNNING)[2]
    world.clock.advance(3600)
    await world.look_and_rest()
    assert world.status.attempt == 1, "a heartbeat that can't be written is not missed"
    world.store.trouble.clear()
    await world.look_and_rest()
    assert world.status.attempt == 1, "nor is it at once when the store is back"
    await world.until_phase(Phase.SUCCEEDED)
    assert world.reasons().count("Started") == 1
    assert world.reasons().count("Resumed") == 0
    assert world.attempts == [1]


async def test_an_attempt_that_ends_while_the_store_is_away_is_judged_when_it_is_back() -> None:
    world = World()
    await world.until_step(300)
    world.trainer.move()
    world.kubernetes.settle()
    world.store.trouble["all"] = DOWN
    await world.look_and_rest()
    assert world.phase is Phase.PENDING
    assert world.job_names() == ["mascot-1"]
    world.store.trouble.clear()
    await world.look_and_rest()
    assert world.phase.value == "Succeeded"


async def test_no_attempt_is_made_while_the_store_is_away() -> None:
    world = World()
    await world.until_step(150)
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 137)
    world.kubernetes.settle()
    await world.look_and_rest()
    world.store.trouble["all"] = DOWN
    world.clock.advance(30)
    await world.look_and_rest()
    assert world.job_names() == ["mascot-1"]
    assert "the store can't be reached" in world.condition(ConditionType.INTERRUPTED)[2]
    world.store.trouble.clear()
    await world.until_phase(Phase.SUCCEEDED)
    assert world.status.restarts.total == 1


async def test_a_store_that_lets_nothing_be_deleted_holds_up_no_job() -> None:
    world = World(JobBuilder().with_config("save", max_step_saves=1))
    world.store.trouble["delete"] = StoreCredentialsError("delete: refused (AccessDenied)")
    await world.until_step(200)
    assert world.condition(ConditionType.CHECKPOINT_GC)[:2] == ("False", "StoreUnavailable")
    assert "AccessDenied" in world.condition(ConditionType.CHECKPOINT_GC)[2]
    assert (world.status.checkpoints.count, world.status.checkpoints.removed) == (2, 0)
    assert "CheckpointsRemoved" not in world.reasons()
    await world.until_phase(Phase.SUCCEEDED)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreMissingError("bucket 'runs' does not exist"), "bucket 'runs' does not exist"),
        (StoreCredentialsError("refused (InvalidAccessKeyId)"), "refused (InvalidAccessKeyId)"),
    ],
)
async def test_a_bucket_that_is_missing_or_closed_makes_the_job_invalid_until_it_is_there(
    error: StoreError, said: str
) -> None:
    world = World()
    world.store.trouble["all"] = error
    assert await world.look_and_rest() == 30.0
    assert world.phase is Phase.INVALID
    assert said in world.condition(ConditionType.ACCEPTED)[2]
    assert world.reasons() == ["NotAccepted"]
    world.store.trouble.clear()
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_missing_secret_is_named_with_its_namespace_and_keys() -> None:
    world = World()
    world.cluster.vanish("Secret", "team-a", "job-s3")
    await world.look_and_rest()
    assert "Secret 'job-s3' does not exist in namespace 'team-a'" in world.condition(ConditionType.ACCEPTED)[2]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "job-s3", "namespace": "team-a"}}
    world.cluster.apply({**secret, "stringData": {"accessKey": "a"}})
    await world.look_and_rest()
    assert "lacks the key secretKey" in world.condition(ConditionType.ACCEPTED)[2]
    assert world.reasons() == ["NotAccepted", "NotAccepted"]
    world.cluster.vanish("Secret", "team-a", "job-s3")
    world.cluster.apply({**secret, "stringData": {"accessKey": "a", "secretKey": "s"}})
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_missing_profile_is_waited_for() -> None:
    world = World()
    profile = world.cluster.get("LoRATrainingProfile", "", "default")
    assert profile is not None
    world.cluster.vanish("LoRATrainingProfile", "", "default")
    assert await world.look_and_rest() == 30.0
    assert "LoRATrainingProfile 'default' does not exist" in world.condition(ConditionType.ACCEPTED)[2]
    world.cluster.apply(profile)
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_profile_that_goes_or_breaks_does_not_disturb_a_running_job() -> None:
    world = World()
    await world.until_step(100)
    profile = world.cluster.get("LoRATrainingProfile", "", "default")
    assert profile is not None
    world.cluster.apply(ProfileBuilder().with_sizing(gpusPerNode=0).manifest())
    await world.tick()
    assert (world.status.phase, world.status.progress.step) == (Phase.RUNNING, 150)  # type: ignore[union-attr]
    world.cluster.vanish("LoRATrainingProfile", "", "default")
    await world.tick()
    assert world.phase is Phase.RUNNING
    world.cluster.apply(profile)
    await world.until_phase(Phase.SUCCEEDED)
    assert world.attempts == [1]
