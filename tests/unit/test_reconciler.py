"""The reconciler's mechanics: what is written when, what is refused, what is away for a while."""

from __future__ import annotations

from typing import Any

import pytest

from lora_api import layout, names
from lora_api.job import KIND, ConditionType, Phase
from lora_api.profile import LoRATrainingProfile
from lora_api.run import Control, RunFile
from lora_api.store import StoreError
from lora_operator.core.views import Manifest
from lora_operator.ports import ClusterError
from tests.unit.builders import JobBuilder, ProfileBuilder
from tests.unit.world import World

DOWN = StoreError("list s3://runs/team-a/mascot/: connection to <urllib3 object at 0x7f0012ab> refused")


async def test_a_job_that_is_gone_needs_nothing() -> None:
    world = World()
    world.cluster.vanish(KIND, "team-a", "mascot")
    assert await world.look() is None


async def test_the_first_attempt_is_made_before_the_status_says_so() -> None:
    world = World()
    seen = []
    inner = world.cluster.create

    async def create(manifest: Manifest) -> bool:
        seen.append((manifest["kind"], world.status.attempt))
        return await inner(manifest)

    world.cluster.create = create  # type: ignore[method-assign]
    await world.look()
    assert sorted(seen) == [("ConfigMap", 0), ("Job", 0), ("Service", 0)]
    assert world.status.attempt == 1


async def test_a_running_job_and_a_waiting_one_are_looked_at_again_without_an_event() -> None:
    world = World()
    assert await world.look() == 5.0
    await world.until_phase(Phase.RUNNING)
    assert world.wait == 5.0
    await world.until_step(100)
    assert world.wait == 10.0
    queued = World(JobBuilder().with_policy(queueName="gpu"))
    queued.kubernetes.kueue = True
    await queued.until_phase(Phase.QUEUED)
    assert queued.wait == 120.0


async def test_another_writer_between_read_and_write_costs_one_more_look_and_loses_no_restart() -> None:
    world = World()
    await world.until_step(150)
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 137)
    world.kubernetes.settle()
    said = len(world.events)
    world.cluster.before_write = lambda: world.cluster.touch(KIND, "team-a", "mascot")
    assert await world.reconciler.reconcile(world.key) == 0.0
    assert len(world.events) == said, "nothing is said of what was not written"
    await world.look()
    assert world.status.restarts.failure == 1
    assert world.reasons().count("Interrupted") == 1


@pytest.mark.parametrize("method", ["read_job", "read_children", "read_pods", "create", "write_status", "read_profile"])
async def test_a_server_that_is_away_is_the_queues_business_and_nothing_is_lost(method: str) -> None:
    world = World()
    world.cluster.fail(method)
    with pytest.raises(ClusterError):
        await world.look()
    await world.until_phase(Phase.SUCCEEDED)
    assert world.attempts == [1]
    assert world.reasons().count("Succeeded") == 1


async def test_progress_alone_is_written_at_most_every_ten_seconds() -> None:
    world = World()
    await world.until_step(100)
    world.trainer.beat("Training")
    await world.look()
    writes = world.writes
    for step in range(1, 10):
        world.clock.advance(1)
        world.trainer.step = 100 + step
        world.trainer.beat("Training")
        await world.look()
    assert world.writes == writes
    world.clock.advance(1)
    world.trainer.beat("Training")
    await world.look()
    assert world.writes == writes + 1
    assert world.status.progress.step == 109  # type: ignore[union-attr]


async def test_what_is_encoded_right_now_counts_as_progress_too() -> None:
    world = World()
    await world.until_phase(Phase.RUNNING)
    world.trainer.beat("PreparingData", detail="encoding 1/12 pictures")
    await world.look()
    writes = world.writes
    for number in range(2, 6):
        world.clock.advance(1)
        world.trainer.beat("PreparingData", detail=f"encoding {number}/12 pictures")
        await world.look()
    assert world.writes == writes
    world.clock.advance(6)
    await world.look()
    assert "encoding 5/12 pictures" in world.condition(ConditionType.RUNNING)[2]


async def test_the_step_does_not_go_backwards_while_a_start_prepares() -> None:
    world = World()
    await world.until_step(150)
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 137)
    seen = []
    for _ in range(6):
        await world.tick()
        progress, stage = world.status.progress, world.status.stage
        assert progress is not None
        seen.append((stage, progress.step))
    assert all(step == 150 for stage, step in seen if stage != "Training"), seen
    assert ("Training", 200) in seen or ("Training", 150) in seen


async def test_old_checkpoints_are_removed_and_counted_once() -> None:
    world = World(JobBuilder().with_config("save", max_step_saves=1))
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.checkpoints.count, world.status.checkpoints.removed) == (1, 2)
    assert world.reasons().count("CheckpointsRemoved") == 2
    assert world.said("CheckpointsRemoved") == "Removed 1 old checkpoint (step 200); 1 are kept"
    kept = [key for key in world.store.data if layout.CHECKPOINTS in key]
    assert {key.split("step-")[1][:9] for key in kept} == {"000000300"}


async def test_a_refused_job_says_why_once_and_is_tried_again_without_a_busy_loop() -> None:
    world = World()
    world.cluster.refusals["Job"] = 'jobs.batch "mascot-1" is forbidden: exceeded quota: gpus'
    assert await world.look_and_rest() == 30.0
    assert world.condition(ConditionType.RECONCILING)[1] == "CreateRefused"
    assert world.reasons() == ["Accepted", "CreateRefused"]
    assert world.cluster.of_kind("ConfigMap") == [], "its content would be old at the next try"
    tries = world.cluster.calls["create"]
    world.clock.advance(30)
    assert await world.look() == 30.0
    assert world.cluster.calls["create"] == tries + 3
    world.cluster.refusals.clear()
    await world.until_phase(Phase.SUCCEEDED)
    assert world.reasons().count("CreateRefused") == world.reasons().count("Created") == 1


async def test_a_foreign_job_of_the_childs_name_is_reported_and_left_alone() -> None:
    world = World()
    foreign = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "mascot-1", "namespace": "team-a"},
        "spec": {"template": {}},
    }
    world.cluster.apply(foreign)
    assert await world.look_and_rest() == 30.0
    assert world.phase is Phase.INVALID
    assert world.condition(ConditionType.ACCEPTED)[1] == "NameTaken"
    assert world.cluster.get("Job", "team-a", "mascot-1") is not None
    world.cluster.vanish("Job", "team-a", "mascot-1")
    await world.until_phase(Phase.SUCCEEDED)
    assert world.reasons().count("NameTaken") == 1


async def test_the_child_of_a_deleted_job_of_this_name_is_waited_for() -> None:
    world = World()
    owner = {"kind": KIND, "name": "mascot", "uid": "earlier", "controller": True}
    metadata = {"name": "mascot-1", "namespace": "team-a", "ownerReferences": [owner]}
    world.cluster.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {}})
    await world.look_and_rest()
    assert (world.status.phase, world.reasons()) == (Phase.PENDING, [])
    world.cluster.vanish("Job", "team-a", "mascot-1")
    await world.until_phase(Phase.SUCCEEDED)


def of_another_job(world: World) -> None:
    """Puts a run.json of somebody else into the run directory."""
    owner = RunFile(uid="x", job_name="rival", namespace="team-b", config_hash="c", created_at=world.clock.text())
    world.store.put("team-a/mascot/run.json", owner.model_dump_json(by_alias=True).encode())


async def test_a_run_directory_of_another_job_is_refused_and_nothing_in_it_is_touched() -> None:
    world = World()
    of_another_job(world)
    data = dict(world.store.data)
    await world.look_and_rest()
    assert world.phase is Phase.INVALID
    assert "belongs to job team-b/rival (uid x)" in world.condition(ConditionType.ACCEPTED)[2]
    assert world.store.data == data
    assert world.job_names() == []


async def test_a_run_directory_of_another_job_is_continued_when_that_is_asked_for() -> None:
    world = World(JobBuilder().with_output(ifExists="Continue"))
    of_another_job(world)
    await world.look_and_rest()
    assert world.job_names() == ["mascot-1"]


async def test_control_is_written_only_when_it_differs_and_follows_the_spec() -> None:
    world = World()
    await world.until_step(50)

    def puts() -> int:
        return sum(call.startswith("put") and call.endswith("control.json") for call in world.store.calls)

    def control() -> Control:
        data = world.store.data["team-a/mascot/control.json"][0]
        return Control.model_validate_json(data)

    assert puts() == 1
    await world.tick()
    world.edit(lambda job: job["spec"]["runPolicy"].update(backoffLimit=7))
    await world.tick()
    assert puts() == 1, "runPolicy is none of the trainer's business"
    world.edit(lambda job: job["spec"]["config"]["train"].update(steps=400, lr=2e-5))
    world.edit(lambda job: job["spec"]["config"]["save"].update(save_every=10, formats=["kohya"]))
    world.edit(lambda job: job["spec"]["config"].update(sample={"prompts": ["a [trigger]"], "width": 256}))
    await world.tick()
    assert puts() == 2
    assert (control().steps, control().lr, control().save_every) == (400, 2e-5, 10)
    assert control().sample["prompts"] == ["a [trigger]"]
    assert control().save["formats"] == ["kohya"]
    assert control().generation == 5
    await world.tick()
    assert puts() == 2


async def test_an_edit_of_a_finished_job_is_seen_and_has_no_effect() -> None:
    world = World()
    await world.until_phase(Phase.SUCCEEDED)
    calls = len(world.store.calls)
    world.edit(lambda job: job["spec"]["config"]["train"].update(steps=900))
    await world.look_and_rest()
    assert world.phase is Phase.SUCCEEDED
    assert world.status.observed_generation == 2
    assert len(world.store.calls) == calls


async def test_only_the_last_finished_attempt_is_kept_for_its_logs() -> None:
    world = World(JobBuilder().with_policy(backoffLimit=9))
    for _ in range(3):
        await world.until_phase(Phase.RUNNING)
        world.kubernetes.end_pod(world.kubernetes.pods()[-1], 1)
        world.kubernetes.settle()
        await world.look()
        world.clock.advance(400)
    await world.until_phase(Phase.RUNNING)
    assert world.job_names() == ["mascot-3", "mascot-4"]


@pytest.mark.parametrize("fails", [0, 1])
async def test_of_two_pods_the_one_that_failed_decides_not_the_one_that_was_stopped_for_it(fails: int) -> None:
    world = World(JobBuilder().on(nodes=2))
    await world.until_step(100)
    world.kubernetes.end_pod(world.kubernetes.pods()[fails], 137)
    await world.until(lambda: world.status.attempt == 2)
    assert (world.status.restarts.failure, world.status.restarts.total) == (1, 1)
    assert "exit code 137 (signal 9)" in world.said("Interrupted")
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_job_of_two_pods_runs_when_both_do() -> None:
    world = World(JobBuilder().on(nodes=2))
    await world.look()
    world.kubernetes.settle()
    pods = world.kubernetes.pods()
    world.cluster.save({**pods[1], "status": {"phase": "Pending"}})
    await world.look_and_rest()
    assert world.phase is Phase.PENDING
    await world.until_phase(Phase.RUNNING)
    assert world.condition(ConditionType.RUNNING)[2].startswith("2 pods run on node-0, node-1")


@pytest.mark.parametrize("name", ["a" * 63, "x.y.z-" + "b" * 57, "7days", "mascot.v2", "a" * 40, "n" * 253])
async def test_every_legal_name_yields_legal_children(name: str) -> None:
    world = World(JobBuilder().named(name))
    await world.until_phase(Phase.SUCCEEDED)
    for kind in ("Job", "Service", "ConfigMap"):
        for child in world.cluster.of_kind(kind):
            assert names._DNS_LABEL.match(child["metadata"]["name"]), child["metadata"]["name"]
            assert len(child["metadata"]["name"]) + len("-63") <= 63, "pod host names end in the index"
            assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())


async def test_the_metrics_are_told_of_every_pass_and_of_the_end() -> None:
    told: list[tuple[Any, ...]] = []

    class Metrics:
        def reconciled(self, key: object, status: object, removed: int) -> None:
            told.append((key, status is not None, removed))

    world = World(JobBuilder().with_config("save", max_step_saves=1))
    world.reconciler._metrics = Metrics()
    await world.until_phase(Phase.SUCCEEDED)
    assert sum(removed for _, _, removed in told) == 2
    world.cluster.vanish(KIND, "team-a", "mascot")
    await world.look()
    assert told[-1] == (world.key, False, 0)


async def test_without_a_cluster_a_directory_will_do_and_looks_are_as_often_as_asked() -> None:
    from lora_operator.reconciler import Reconciler

    world = World()
    world.cluster.vanish("Secret", "team-a", "job-s3")
    profile = ProfileBuilder().manifest()
    profile["spec"]["stores"] = [{"name": "default", "type": "directory", "directory": "/data"}]
    assert LoRATrainingProfile.model_validate(profile)
    world.cluster.apply(profile)
    world.reconciler = Reconciler(world.cluster, world.stores, world.clock, in_cluster=False, poll_seconds=1.0)
    assert await world.look() == 1.0
    assert world.job_names() == ["mascot-1"]
    world.restart()
    world.cluster.vanish("Job", "team-a", "mascot-1")
    await world.look()
    assert "is a directory, which pods can't reach" in world.condition(ConditionType.ACCEPTED)[2]
