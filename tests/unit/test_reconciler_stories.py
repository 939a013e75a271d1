"""Whole lives of jobs, step by step, through the reconciler and a small world around it."""

from __future__ import annotations

from lora_api.job import ConditionType, Phase
from lora_operator.core.conditions import holds
from tests.unit.builders import JobBuilder
from tests.unit.world import World


async def test_a_job_goes_from_apply_to_succeeded_and_each_thing_is_said_once() -> None:
    world = World()
    await world.look_and_rest()
    assert world.status.attempt == 1
    assert world.job_names() == ["mascot-1"]
    await world.until_phase(Phase.RUNNING)
    await world.until_phase(Phase.SUCCEEDED)
    assert world.reasons() == [
        "Accepted",
        "Created",
        "Started",
        "CheckpointSaved",
        "CheckpointSaved",
        "CheckpointSaved",
        "Succeeded",
    ]
    status = world.status
    assert (status.progress.step, status.progress.percent, status.progress.eta) == (300, "100%", "0s")  # type: ignore[union-attr]
    assert status.restarts.total == 0
    assert status.output.adapter == "s3://runs/team-a/mascot/final/mascot.safetensors"
    assert status.completion_time is not None
    assert world.said("Succeeded").startswith("Trained 300 steps; the adapter is s3://runs/team-a/mascot/final/")


async def test_a_finished_job_costs_no_write_and_no_look_into_the_store() -> None:
    world = World()
    await world.until_phase(Phase.SUCCEEDED)
    writes, calls = world.writes, len(world.store.calls)
    world.kubernetes.cluster.delete("Job", "team-a", "mascot-1")
    world.restart()
    assert await world.look() is None
    assert (world.writes, len(world.store.calls)) == (writes, calls)


async def test_a_preempted_job_saves_and_its_next_attempt_goes_on_from_there() -> None:
    world = World()
    await world.until_step(150)
    world.kubernetes.disrupt(world.kubernetes.pods()[0], "preempting to accommodate a higher priority pod")
    await world.look_and_rest()
    assert world.condition(ConditionType.RUNNING)[1] == "Stopping"
    await world.until(lambda: world.status.attempt == 2)
    assert world.status.restarts.preemption == 1
    await world.until_phase(Phase.SUCCEEDED)
    assert world.status.restarts.total == 1
    assert world.said("Interrupted").startswith("Attempt 1 ended: ")
    assert "saved at step 150" in world.said("Interrupted")
    assert world.said("Resumed") == "Resumed from the checkpoint of step 150"
    assert world.reasons().count("Interrupted") == world.reasons().count("Resumed") == 1
    assert world.attempts == [1, 2]


async def test_a_pod_that_is_gone_before_the_operator_looks_is_told_by_its_job_and_the_heartbeat() -> None:
    world = World()
    await world.until_step(150)
    world.kubernetes.disrupt(world.kubernetes.pods()[0], "drained")
    world.trainer.move()
    world.kubernetes.settle()
    assert world.kubernetes.pods() == []
    await world.look_and_rest()
    assert world.status.restarts.preemption == 1
    assert world.said("Interrupted") == "Attempt 1 ended: A pod was disrupted; saved at step 150"


async def test_a_job_and_its_pod_that_are_both_gone_are_told_by_the_heartbeat_alone() -> None:
    world = World()
    await world.until_step(150)
    world.cluster.delete("Job", "team-a", "mascot-1")
    await world.look_and_rest()
    assert world.phase is Phase.RUNNING
    await world.until(lambda: world.status.attempt == 2)
    assert world.status.restarts.preemption == 1
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_job_that_vanished_with_its_pods_and_left_no_word_counts_as_infrastructure() -> None:
    world = World()
    await world.until_step(150)
    world.cluster.vanish("Job", "team-a", "mascot-1")
    for pod in world.kubernetes.pods():
        world.cluster.vanish("Pod", "team-a", pod["metadata"]["name"])
    await world.look_and_rest()
    assert world.status.restarts.infrastructure == 1
    await world.until_phase(Phase.SUCCEEDED)
    assert world.status.lost_steps == 50


async def test_a_job_that_is_preempted_again_and_again_before_it_saves_waits_and_still_gets_there() -> None:
    world = World()
    world.trainer.saves = False
    waits = []
    for _ in range(3):
        await world.until_phase(Phase.RUNNING)
        world.kubernetes.disrupt(world.kubernetes.pods()[-1], "preempted")
        world.trainer.move()
        world.kubernetes.settle()
        await world.look_and_rest()
        waits.append(world.status.retry_at is not None)
    assert waits == [False, True, True]
    assert "3 attempts in a row have saved no checkpoint" in world.said("Interrupted")
    assert "the next attempt begins at" in world.condition(ConditionType.INTERRUPTED)[2]
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.restarts.preemption, world.status.restarts.total) == (3, 3)


async def test_a_deleted_pod_counts_as_preemption() -> None:
    world = World()
    await world.until_step(100)
    world.cluster.delete_pod(world.kubernetes.pods()[0])
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.restarts.preemption, world.status.restarts.total) == (1, 1)


async def test_a_killed_process_counts_as_failure_and_is_tried_again_after_the_back_off() -> None:
    world = World()
    await world.until_step(150)
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 137)
    world.kubernetes.settle()
    wait = await world.look_and_rest()
    assert world.status.restarts.failure == 1
    assert wait == 10.0
    assert world.job_names() == ["mascot-1"]
    assert "the next attempt begins at" in world.condition(ConditionType.INTERRUPTED)[2]
    world.clock.advance(9)
    await world.look_and_rest()
    assert world.job_names() == ["mascot-1"]
    world.clock.advance(1)
    await world.look_and_rest()
    assert world.job_names() == ["mascot-1", "mascot-2"]
    await world.until_phase(Phase.SUCCEEDED)
    assert world.status.lost_steps == 50
    assert world.said("Resumed") == "Resumed from the checkpoint of step 100; 50 steps are done again"


async def test_back_off_doubles_and_the_limit_ends_the_job() -> None:
    world = World(JobBuilder().with_policy(backoffLimit=3))
    waits = []
    for _ in range(4):
        await world.until_phase(Phase.RUNNING)
        world.kubernetes.end_pod(world.kubernetes.pods()[-1], 1)
        world.kubernetes.settle()
        waits.append(await world.look_and_rest())
        world.clock.advance(waits[-1] or 0)
    assert waits == [10.0, 20.0, 40.0, None]
    assert world.phase is Phase.FAILED
    assert world.status.restarts.failure == 3
    assert world.condition(ConditionType.FAILED)[2].endswith("(failure 4; backoffLimit is 3)")
    assert world.attempts == [1, 2, 3, 4]
    assert world.reasons().count("Failed") == 1


async def test_without_retries_the_first_failure_is_the_end() -> None:
    world = World(JobBuilder().with_policy(backoffLimit=0))
    await world.until_phase(Phase.RUNNING)
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 1)
    world.kubernetes.settle()
    await world.look_and_rest()
    assert world.phase is Phase.FAILED
    assert world.status.attempt == 1


async def test_what_a_person_must_put_right_is_never_tried_again() -> None:
    world = World()
    await world.until_phase(Phase.RUNNING)
    from tests.unit.builders import word

    said = word(65, "spec.config.datasets[0].folder_path: no pictures in s3://datasets/mascot", reason="InvalidData")
    world.kubernetes.end_pod(world.kubernetes.pods()[0], 65, said)
    world.kubernetes.settle()
    await world.look_and_rest()
    assert world.condition(ConditionType.FAILED)[1:] == ("InvalidData", said.message)
    assert world.condition(ConditionType.STALLED)[0] == "True"
    assert world.status.restarts.total == 0


async def test_a_pod_on_a_lost_node_is_given_up_after_its_grace_and_the_next_attempt_begins() -> None:
    world = World()
    await world.until_step(150)
    pod = world.kubernetes.pods()[0]
    world.kubernetes.lost_nodes.add(pod["spec"]["nodeName"])
    world.kubernetes.disrupt(pod, "Taint manager: deleting due to NoExecute taint")
    world.clock.advance(100)
    await world.look_and_rest()
    assert (world.status.phase, world.status.attempt) == (Phase.RUNNING, 1)
    world.clock.advance(60)
    await world.look_and_rest()
    assert world.status.restarts.infrastructure == 1
    assert world.status.attempt == 2
    assert "mascot-2" in world.job_names()
    assert "can't be reached" in world.said("Interrupted")


async def test_suspending_saves_and_frees_the_pods_and_resuming_goes_on() -> None:
    world = World()
    await world.until_step(150)
    world.edit(lambda job: job["spec"]["runPolicy"].update(suspend=True))
    await world.look_and_rest()
    assert world.condition(ConditionType.RUNNING)[1] == "Suspending"
    await world.until_phase(Phase.SUSPENDED)
    assert world.kubernetes.pods() == []
    assert world.status.restarts.total == 0
    assert world.status.checkpoints.newest_step == 150
    assert world.status.progress.eta is None  # type: ignore[union-attr]
    world.edit(lambda job: job["spec"]["runPolicy"].update(suspend=False))
    await world.until_phase(Phase.SUCCEEDED)
    assert world.attempts == [1, 2]
    assert world.reasons().count("Suspended") == 1


async def test_a_job_may_be_suspended_from_the_beginning() -> None:
    world = World(JobBuilder().suspended())
    assert await world.look_and_rest() is None
    assert world.phase is Phase.SUSPENDED
    assert world.job_names() == []
    world.edit(lambda job: job["spec"]["runPolicy"].update(suspend=False))
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_job_that_is_suspended_while_it_waits_in_a_queue_leaves_the_queue_at_once() -> None:
    world = World(JobBuilder().with_policy(queueName="gpu"))
    world.kubernetes.kueue = True
    await world.until_phase(Phase.QUEUED)
    world.edit(lambda job: job["spec"]["runPolicy"].update(suspend=True))
    await world.look_and_rest()
    assert (world.phase, world.job_names()) == (Phase.SUSPENDED, [])


async def test_kueue_takes_the_quota_back_and_the_same_attempt_goes_on_when_it_is_admitted() -> None:
    world = World(JobBuilder().with_policy(queueName="gpu"))
    world.kubernetes.kueue = True
    await world.until_phase(Phase.QUEUED)
    assert world.condition(ConditionType.QUEUED)[1] == "AwaitingAdmission"
    world.kubernetes.suspend_child(False)
    await world.until_step(150)
    world.kubernetes.suspend_child()
    await world.tick()
    assert world.phase is Phase.INTERRUPTED
    await world.tick()
    assert world.kubernetes.pods() == []
    world.kubernetes.suspend_child(False)
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.restarts.preemption, world.status.attempt) == (1, 1)
    assert world.reasons().count("Started") == 2


async def test_a_job_that_fails_because_kueue_suspended_it_is_counted_once() -> None:
    world = World(JobBuilder().with_policy(queueName="gpu"))
    world.kubernetes.suspension_fails_jobs = True
    await world.until_step(150)
    world.kubernetes.suspend_child()
    await world.look_and_rest()
    assert world.status.restarts.preemption == 1
    await world.until(lambda: world.status.attempt == 2)
    await world.until_phase(Phase.SUCCEEDED)
    assert (world.status.restarts.preemption, world.status.restarts.total) == (1, 1)


async def test_a_job_is_queued_while_nothing_fits_and_stays_interrupted_after_a_preemption() -> None:
    world = World()
    world.kubernetes.unschedulable = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    await world.until_phase(Phase.QUEUED)
    assert "Insufficient nvidia.com/gpu" in world.condition(ConditionType.QUEUED)[2]
    world.kubernetes.unschedulable = None
    await world.until_step(100)
    world.kubernetes.disrupt(world.kubernetes.pods()[0], "preempting")
    world.trainer.move()
    await world.look_and_rest()
    world.kubernetes.unschedulable = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    await world.until(lambda: world.status.attempt == 2)
    await world.tick()
    assert world.phase is Phase.INTERRUPTED
    why = world.condition(ConditionType.INTERRUPTED)[2]
    assert why.startswith("A pod was disrupted; saved at step 100 — Pod mascot-2-0-00002: ")
    assert "Insufficient nvidia.com/gpu" in why
    world.kubernetes.unschedulable = None
    await world.until_phase(Phase.SUCCEEDED)


async def test_a_second_reason_replaces_the_first_and_messages_do_not_grow() -> None:
    world = World()
    for number in range(4):
        await world.until_phase(Phase.RUNNING)
        world.kubernetes.disrupt(world.kubernetes.pods()[-1], f"reason {number}")
        await world.look_and_rest()
        assert f"(reason {number})" in world.condition(ConditionType.RUNNING)[2]
        await world.until(lambda: not holds(world.status, ConditionType.RUNNING))
        assert world.condition(ConditionType.INTERRUPTED)[2].startswith("A pod was disrupted; saved at step")
    await world.until_phase(Phase.SUCCEEDED)
    assert world.status.restarts.preemption == 4


async def test_an_image_that_can_not_be_pulled_is_quoted_and_the_deadline_ends_it() -> None:
    world = World(JobBuilder().with_policy(startupDeadlineSeconds=60))
    world.kubernetes.waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/x"'}
    await world.tick()
    await world.tick()
    reconciling = world.condition(ConditionType.RECONCILING)
    assert reconciling[1] == "ImagePullBackOff"
    assert "Back-off pulling image" in world.condition(ConditionType.READY)[2]
    await world.until_phase(Phase.FAILED)
    assert world.condition(ConditionType.FAILED)[1] == "StartupDeadlineExceeded"
    assert "Back-off pulling image" in world.condition(ConditionType.FAILED)[2]
    assert world.kubernetes.pods() == []
    assert world.job_names() == []


async def test_waiting_in_a_queue_does_not_count_against_the_startup_deadline() -> None:
    world = World(JobBuilder().with_policy(startupDeadlineSeconds=60, queueName="gpu"))
    world.kubernetes.kueue = True
    await world.until_phase(Phase.QUEUED)
    world.clock.advance(3600)
    world.kubernetes.unschedulable = "no place"
    world.kubernetes.suspend_child(False)
    await world.tick()
    assert world.phase is Phase.QUEUED


async def test_a_trainer_without_heartbeat_is_restarted() -> None:
    world = World()
    await world.until_step(150)
    world.trainer.hangs = True
    world.clock.advance(580)
    await world.look_and_rest()
    assert world.status.attempt == 1
    world.clock.advance(30)
    await world.look_and_rest()
    assert world.status.restarts.failure == 1
    assert "No heartbeat at step 150" in world.said("Interrupted")
    world.trainer.hangs = False
    await world.until_phase(Phase.SUCCEEDED)
    assert world.status.attempt == 2


async def test_a_hanging_job_at_its_limit_fails_only_when_its_pods_are_gone() -> None:
    world = World(JobBuilder().with_policy(backoffLimit=0))
    await world.until_step(150)
    world.trainer.hangs = True
    world.clock.advance(700)
    await world.look_and_rest()
    assert world.phase is Phase.INTERRUPTED
    assert world.job_names() == []
    await world.until_phase(Phase.FAILED)
    assert world.condition(ConditionType.FAILED)[1] == "NoProgress"
    assert world.kubernetes.pods() == []
    assert world.reasons().count("Failed") == 1


async def test_a_process_that_does_not_leave_after_its_result_is_stopped() -> None:
    world = World()
    await world.until_step(300)
    world.trainer.finish()
    await world.look_and_rest()
    assert world.phase is Phase.RUNNING
    world.clock.advance(61)
    await world.look_and_rest()
    assert world.phase.value == "Succeeded"
    assert world.job_names() == []


async def test_a_lost_status_is_taken_up_where_the_newest_attempt_stands() -> None:
    world = World()
    await world.until_step(100)
    world.cluster.delete_pod(world.kubernetes.pods()[0])
    await world.until(lambda: world.status.attempt == 2 and world.phase is Phase.RUNNING)
    job = world.job
    assert job is not None
    del job["status"]
    world.cluster.save(job)
    world.cluster.on_status = lambda _before, _after: None
    await world.look()
    assert world.status.attempt == 2
    assert "mascot-2" in world.job_names()
    await world.until_phase(Phase.SUCCEEDED)
