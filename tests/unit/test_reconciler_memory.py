"""Jobs whose memory runs out, step by step, through the reconciler and a small world around it."""

from __future__ import annotations

import json

from lora_api.job import ConditionType, Phase, ShrunkStatus
from lora_api.run import ExitWord
from tests.unit.builders import JobBuilder, word
from tests.unit.world import World

SAID = word(86, "out of device memory while training step 151: CUDA out of memory", reason="OutOfDeviceMemory")


async def run_out(world: World, said: ExitWord = SAID) -> None:
    """The pod that runs has no room for what it trains."""
    await world.until_phase(Phase.RUNNING)
    world.kubernetes.end_pod(world.kubernetes.pods()[-1], 86, said)
    world.kubernetes.settle()
    await world.look_and_rest()


def told(world: World, attempt: int) -> int:
    """How often an attempt was told that the run was made smaller."""
    config_map = world.cluster.get("ConfigMap", "team-a", f"mascot-{attempt}")
    assert config_map is not None
    return int(json.loads(config_map["data"]["run.json"])["shrunk"])


def batches(size: int) -> JobBuilder:
    return JobBuilder().with_config("train", batch_size=size)


async def test_a_job_that_does_not_fit_is_made_smaller_until_it_does_and_finishes() -> None:
    world = World(batches(4).with_policy(backoffLimit=0))
    await world.until_step(150)
    await run_out(world)
    await run_out(world)
    assert world.status.shrunk == ShrunkStatus(times=2, batch_size=1, gradient_accumulation=4)
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.restarts.out_of_memory, world.status.restarts.total) == (2, 2)
    assert world.attempts == [1, 2, 3]
    assert told(world, 3) == 2
    assert world.reasons().count("Shrunk") == 2
    assert world.said("Shrunk").startswith("Attempt 3 trains batch_size 1 x gradient_accumulation 4 instead of")
    assert world.status.lost_steps == 50, "it went on from its checkpoint"


async def test_it_stays_small_over_preemptions_and_a_new_operator() -> None:
    world = World(batches(4))
    await world.until_step(100)
    await run_out(world)
    world.restart()
    await world.until_phase(Phase.RUNNING)
    world.kubernetes.disrupt(world.kubernetes.pods()[-1], "preempted")
    await world.until(lambda: world.status.attempt == 3)
    await world.until_phase(Phase.SUCCEEDED)
    assert told(world, 3) == 1
    assert world.status.shrunk == ShrunkStatus(times=1, batch_size=2, gradient_accumulation=2)
    assert (world.status.restarts.out_of_memory, world.status.restarts.preemption) == (1, 1)


async def test_what_can_not_be_made_smaller_fails_with_advice_and_nothing_is_left_running() -> None:
    world = World()
    await run_out(world)
    assert world.condition(ConditionType.INTERRUPTED)[1] == "OutOfDeviceMemory"
    assert world.status.shrunk == ShrunkStatus(times=1, gradient_checkpointing=True)
    await run_out(world)
    assert world.phase is Phase.FAILED
    assert "quantize the base model" in world.condition(ConditionType.FAILED)[2]
    assert world.said("Failed").endswith(SAID.message[1:])
    assert all(pod["status"]["phase"] != "Running" for pod in world.kubernetes.pods())


async def test_a_policy_that_is_changed_while_the_job_runs_holds_from_then_on() -> None:
    world = World(batches(4).with_policy(oomPolicy="Fail"))
    await world.until_step(100)
    world.edit(lambda job: job["spec"]["runPolicy"].update(oomPolicy="Shrink"))
    await run_out(world)
    assert world.status.attempt == 2
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_pod_killed_for_its_memory_counts_as_out_of_memory_and_waits_like_a_failure() -> None:
    world = World()
    await world.until_phase(Phase.RUNNING)
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 137, oom=True)
    world.kubernetes.settle()
    assert await world.look_and_rest() == 10.0
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.restarts.out_of_memory, world.status.shrunk) == (1, None)
    assert "used more memory than its limit" in world.said("Interrupted")
    assert "spec.resources.memory" in world.said("Interrupted")
