"""What is decided from one look: state, actions, next look. Whole lives are in test_reconciler_stories."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from lora_api.job import FINALIZER, ConditionType, JobStatus, Phase, Restarts
from lora_api.run import CheckpointManifest
from lora_operator.core.conditions import condition_of, merge_conditions
from lora_operator.core.endings import backoff_seconds
from lora_operator.core.plan import plan
from lora_operator.core.state import Kind, State, facts_of
from lora_operator.core.times import format_time
from lora_operator.core.views import Plan
from tests.unit.builders import (
    NOW,
    ChildBuilder,
    JobBuilder,
    ObservedBuilder,
    PodBuilder,
    ProfileBuilder,
    RunBuilder,
    ago,
    beat,
    checkpoint,
    final,
    word,
)


def status(kind: Kind = Kind.RUNNING, reason: str = "Training", message: str = "", **fields: object) -> JobStatus:
    """The status of a job in its first attempt, which has run."""
    conditions = merge_conditions((), facts_of(State(kind, reason, message)), 1, NOW - timedelta(minutes=9))
    known = {"attempt": 1, "child_name": "mascot-1", "stage": "Training", "observed_generation": 1, "phase": "Running"}
    return JobStatus.model_validate({**known, "conditions": conditions, **fields})


def running(job: JobBuilder | None = None) -> ObservedBuilder:
    """A job that trains."""
    observed = ObservedBuilder(job).with_status(status()).with_child(ChildBuilder(), PodBuilder())
    return observed.with_run(RunBuilder().with_progress(150))


def reasons(decided: Plan) -> list[str]:
    return [event.reason for event in decided.events]


def condition(decided: Plan, kind: ConditionType) -> tuple[str, str, str]:
    found = condition_of(decided.status, kind)
    assert found is not None
    return found.status, found.reason, found.message


def test_a_new_job_gets_its_first_attempt_at_once() -> None:
    decided = plan(ObservedBuilder().build())
    assert (decided.status.attempt, decided.status.child_name) == (1, "mascot-1")
    assert [made["metadata"]["name"] for made in decided.create] == ["mascot-1"] * 3
    assert reasons(decided) == ["Accepted", "Created"]


def test_a_first_attempt_that_was_made_and_not_written_down_is_taken_over_and_told_of() -> None:
    decided = plan(ObservedBuilder().with_child(ChildBuilder()).build())
    assert (decided.status.attempt, decided.status.child_name, decided.create) == (1, "mascot-1", ())
    assert reasons(decided) == ["Accepted", "Created"]


def test_the_attempt_that_was_written_down_is_made() -> None:
    written = status(Kind.PENDING, "Accepted", stage=None)
    decided = plan(ObservedBuilder().with_status(written).build())
    assert [manifest["kind"] for manifest in decided.create] == ["ConfigMap", "Service", "Job"]
    assert decided.status.attempt == 1
    assert decided.requeue_after_seconds


def test_the_finalizer_is_set_when_deletion_deletes_and_taken_away_when_it_does_not() -> None:
    with_data = JobBuilder().with_output(deletionPolicy="Delete")
    assert plan(ObservedBuilder(with_data).build()).finalizers == (FINALIZER,)
    assert plan(ObservedBuilder(with_data.with_metadata(finalizers=["x/y", FINALIZER])).build()).finalizers is None
    kept = JobBuilder().with_metadata(finalizers=["x/y", FINALIZER])
    assert plan(ObservedBuilder(kept).build()).finalizers == ("x/y",)


def test_a_heartbeat_of_another_attempt_is_not_this_ones() -> None:
    decided = plan(running().with_run(RunBuilder().with_progress(150, attempt=7, stage="Finalizing")).build())
    assert decided.status.stage == "Initializing"


def test_a_stopping_pod_is_quoted_and_the_job_still_runs() -> None:
    pod = PodBuilder().disrupted("node drain").deleted()
    decided = plan(running().with_pods(pod).build())
    assert decided.status.phase is Phase.RUNNING
    assert "is being stopped (node drain); saving" in condition(decided, ConditionType.RUNNING)[2]


def test_pods_that_have_ended_before_their_job_says_how_leave_the_job_running() -> None:
    for pods in ((PodBuilder().ended(137),), ()):
        decided = plan(running().with_pods(*pods).build())
        assert decided.status.phase is Phase.RUNNING
        assert (decided.status.attempt, decided.status.restarts_total) == (1, 0)


def test_an_ended_attempt_is_counted_and_the_next_one_written_down_in_one_status() -> None:
    failed = running().with_child(ChildBuilder().failed(), PodBuilder().ended(1))
    decided = plan(failed.build())
    assert (decided.status.attempt, decided.status.child_name) == (2, "mascot-2")
    assert (decided.status.restarts.failure, decided.status.restarts_total) == (1, 1)
    assert decided.status.retry_at == format_time(NOW + timedelta(seconds=10))
    assert decided.create == ()
    assert decided.delete_children == ()
    assert reasons(decided) == ["Interrupted"]


def test_a_preemption_is_not_limited_and_does_not_wait() -> None:
    many = status(restarts=Restarts(preemption=99, failure=3), restarts_total=102)
    ended = PodBuilder().ended(85, word(85)).disrupted()
    decided = plan(running().with_status(many).with_child(ChildBuilder().failed(), ended).build())
    assert decided.status.phase is Phase.INTERRUPTED
    assert decided.status.restarts.preemption == 100
    assert decided.status.retry_at is None


def preempted(before: JobStatus, *saved: CheckpointManifest) -> JobStatus:
    ended = running().with_status(before).with_child(ChildBuilder().failed(), PodBuilder().ended(137).disrupted())
    return plan(ended.with_run(RunBuilder().with_progress(150).with_checkpoints(*saved)).build()).status


def test_preemptions_before_anything_was_saved_wait_longer_and_longer_up_to_the_profiles_maximum() -> None:
    waits = []
    for fruitless in (0, 1, 2, 3, 40):
        after = preempted(status(fruitless_restarts=fruitless), checkpoint(100, uid="another job's"))
        assert (after.fruitless_restarts, after.restarts.preemption, after.attempt) == (fruitless + 1, 1, 2)
        waits.append(after.retry_at)
    assert waits == [None, *(format_time(NOW + timedelta(seconds=each)) for each in (10, 20, 40, 360))]


def test_a_checkpoint_of_the_attempt_itself_ends_the_waiting() -> None:
    after = preempted(status(fruitless_restarts=7), checkpoint(100))
    assert (after.fruitless_restarts, after.retry_at) == (0, None)
    old = preempted(status(fruitless_restarts=7, attempt=2, child_name="mascot-2"), checkpoint(100))
    assert old.fruitless_restarts == 8, "an earlier attempt's does not count"


def test_host_memory_counts_against_the_same_limit_as_failures() -> None:
    tried = status(restarts=Restarts(failure=2, out_of_memory=1), restarts_total=3)
    decided = plan(running().with_status(tried).with_child(ChildBuilder().failed(), PodBuilder().oom_killed()).build())
    assert decided.status.phase is Phase.FAILED
    assert condition(decided, ConditionType.FAILED)[1] == "OutOfHostMemory"
    assert decided.status.completion_time == format_time(NOW)


@pytest.mark.parametrize(("failures", "seconds"), [(0, 10), (1, 20), (4, 160), (5, 320), (6, 360), (500, 360)])
def test_back_off_doubles_up_to_the_profiles_maximum(failures: int, seconds: float) -> None:
    assert backoff_seconds(ObservedBuilder().build(), failures) == seconds


def test_back_off_is_never_shorter_than_asked_for() -> None:
    late = running().with_child(ChildBuilder().failed(), PodBuilder().ended(1)).at(0.7)
    assert plan(late.build()).status.retry_at == format_time(NOW + timedelta(seconds=11))


def test_a_result_beats_every_other_sign() -> None:
    seen = running().with_run(RunBuilder().with_progress(290, loss=0.25).with_final())
    for child, pods in (
        (ChildBuilder().complete(), (PodBuilder().ended(0),)),
        (ChildBuilder().failed(), (PodBuilder().ended(137).disrupted(),)),
        (ChildBuilder().failed(), ()),
    ):
        decided = plan(seen.with_child(child, *pods).build())
        assert decided.status.phase is Phase.SUCCEEDED
        assert (decided.status.progress.step, decided.status.progress.loss) == (300, "0.2500")  # type: ignore[union-attr]
        assert decided.requeue_after_seconds is None
    gone = seen.seen(child=None, pods=())
    assert plan(gone.build()).status.phase is Phase.SUCCEEDED


def test_an_earlier_jobs_result_is_not_this_jobs() -> None:
    job = JobBuilder().with_output(ifExists="Continue")
    seen = ObservedBuilder(job).with_run(RunBuilder().of_another_job().with_final(final(uid="other")))
    decided = plan(seen.build())
    assert (decided.status.phase, decided.status.attempt) == (Phase.PENDING, 1)
    assert decided.status.output.adapter is None


def test_a_result_in_a_refused_directory_is_not_this_jobs() -> None:
    decided = plan(ObservedBuilder().with_run(RunBuilder().of_another_job().with_final()).build())
    assert decided.status.phase is Phase.INVALID


def test_a_finished_job_stays_as_it_is_whatever_is_seen() -> None:
    for kind in (Kind.SUCCEEDED, Kind.FAILED):
        over = status(kind, "Done", "done", stage=None, completion_time=ago(60))
        seen = running().with_status(over).with_child(ChildBuilder().failed(), PodBuilder().ended(1))
        decided = plan(seen.build())
        assert decided == Plan(status=over)


def test_a_failed_job_stops_what_somebody_left_running() -> None:
    over = status(Kind.FAILED, "Done", "done", stage=None)
    decided = plan(running().with_status(over).build())
    assert decided.delete_children == (("mascot-1", "child-1"),)


def test_silence_is_measured_from_the_last_sign_of_any_kind() -> None:
    old = RunBuilder().with_progress(150, updated_at=ago(601))
    fresh_pod = running().with_run(old)
    assert plan(fresh_pod.build()).status.attempt == 1, "its container began a minute ago"
    assert plan(fresh_pod.at(539).build()).status.attempt == 1
    assert plan(fresh_pod.at(541).build()).status.attempt == 2


def test_a_heartbeat_without_progress_is_a_hang_and_said_to_be_one() -> None:
    hangs = RunBuilder().with_progress(150, updated_at=ago(1), advanced_at=ago(601))
    seen = running().with_run(hangs).seen(pods=(replace(PodBuilder().build(), started_at=None),))
    decided = plan(seen.build())
    assert (decided.status.attempt, decided.status.restarts.failure) == (2, 1)
    text = condition(decided, ConditionType.INTERRUPTED)[2]
    assert "The trainer is alive, but makes no progress at step 150 for 10m01s" in text
    advances = RunBuilder().with_progress(150, updated_at=ago(1), advanced_at=ago(599))
    assert plan(seen.with_run(advances).build()).status.attempt == 1


@pytest.mark.parametrize(
    "pods",
    [
        (PodBuilder(0), PodBuilder(1).pending()),
        (PodBuilder(0).deleted(),),
        (PodBuilder(0).ended(1),),
        (),
    ],
)
def test_what_waits_or_leaves_has_not_stalled(pods: tuple[PodBuilder, ...]) -> None:
    old = RunBuilder().with_progress(150, updated_at=ago(9999))
    assert plan(running().with_run(old).with_pods(*pods).at(9999).build()).status.attempt == 1


def test_stall_detection_can_be_switched_off() -> None:
    job = JobBuilder().with_policy(stallTimeoutSeconds=0)
    assert plan(running(job).at(99999).build()).status.attempt == 1


def test_silence_on_a_node_that_can_not_be_reached_is_the_nodes() -> None:
    pod = replace(PodBuilder().build(), phase="Unknown")
    decided = plan(running().seen(pods=(pod,)).at(9999).build())
    assert decided.status.restarts.infrastructure == 1


def test_an_attempt_waits_for_pods_of_the_one_before_but_not_for_those_out_of_reach() -> None:
    interrupted = status(Kind.INTERRUPTED, "Preempted", "because", attempt=2, child_name="mascot-2", stage=None)
    seen = ObservedBuilder().with_status(interrupted)
    waits = plan(seen.with_others([ChildBuilder(1).failed()], [PodBuilder().deleted()]).build())
    assert (waits.create, waits.delete_children) == ((), ())
    assert "waiting for 1 pod of an earlier attempt" in condition(waits, ConditionType.INTERRUPTED)[2]
    lost = plan(seen.with_others([ChildBuilder(1).failed()], [PodBuilder().deleted(grace_over=True)]).build())
    assert len(lost.create) == 3


def test_a_job_of_an_earlier_attempt_is_stopped_first_and_one_that_is_going_is_not_waited_for() -> None:
    interrupted = status(Kind.INTERRUPTED, "Preempted", "because", attempt=2, child_name="mascot-2", stage=None)
    seen = ObservedBuilder().with_status(interrupted)
    stops = plan(seen.with_others([ChildBuilder(1)]).build())
    assert (stops.create, stops.delete_children) == ((), (("mascot-1", "child-1"),))
    goes = plan(seen.with_others([ChildBuilder(1).terminating()]).build())
    assert len(goes.create) == 3


def test_pods_that_outlive_their_job_are_followed_to_their_end() -> None:
    orphan = running().seen(child=None)
    assert plan(orphan.build()).status.phase is Phase.RUNNING
    assert plan(orphan.build()).create == ()
    ended = orphan.with_pods(PodBuilder().ended(1))
    assert plan(ended.build()).status.restarts.failure == 1


def test_a_job_deleted_before_it_ran_is_made_again_under_the_same_number() -> None:
    waiting = status(Kind.PENDING, "Starting", stage=None)
    decided = plan(ObservedBuilder().with_status(waiting).build())
    assert (decided.status.attempt, decided.status.restarts_total) == (1, 0)
    assert decided.create


def test_a_failure_that_must_stop_something_first_is_an_intention_until_that_is_gone() -> None:
    job = JobBuilder().with_policy(backoffLimit=0)
    silent = running(job).at(9999)
    begins = plan(silent.build())
    assert begins.status.phase is Phase.INTERRUPTED
    assert begins.status.completion_time is not None
    assert begins.delete_children == ()
    goes_on = plan(silent.with_status(begins.status).build())
    assert goes_on.delete_children == (("mascot-1", "child-1"),)
    ends = plan(silent.with_status(goes_on.status).seen(child=None, pods=()).build())
    assert ends.status.phase is Phase.FAILED
    assert condition(ends, ConditionType.FAILED)[1] == "NoProgress"
    saved_after_all = silent.with_status(goes_on.status).with_run(RunBuilder().with_final())
    assert plan(saved_after_all.seen(child=None, pods=()).build()).status.phase is Phase.SUCCEEDED


def test_suspending_bumps_the_attempt_once_and_counts_no_restart() -> None:
    job = JobBuilder().suspended()
    first = plan(running(job).build())
    assert (first.status.attempt, first.status.restarts_total) == (2, 0)
    assert first.status.phase is Phase.RUNNING
    second = ObservedBuilder(job).with_status(first.status)
    second = second.with_others([ChildBuilder(1)], [PodBuilder().deleted()])
    decided = plan(second.build())
    assert decided.status.attempt == 2
    assert decided.delete_children == (("mascot-1", "child-1"),)


def test_kueues_word_is_counted_once() -> None:
    held = running().with_child(ChildBuilder().suspended(), PodBuilder().deleted())
    first = plan(held.build())
    assert first.status.restarts.preemption == 1
    again = plan(held.with_status(first.status).build())
    assert again.status == first.status
    assert again.events == ()


def test_the_scheduler_is_quoted() -> None:
    waiting = status(Kind.PENDING, "Starting", stage=None)
    seen = ObservedBuilder().with_status(waiting).with_child(ChildBuilder(), PodBuilder().unschedulable("0/3 nodes"))
    decided = plan(seen.build())
    assert decided.status.phase is Phase.QUEUED
    assert condition(decided, ConditionType.QUEUED)[1:] == ("Unschedulable", "Pod mascot-1-0-abcde: 0/3 nodes")


def test_a_warning_about_a_pod_is_quoted_when_nothing_better_is_known() -> None:
    waiting = status(Kind.PENDING, "Starting", stage=None)
    seen = ObservedBuilder().with_status(waiting).with_child(ChildBuilder(), PodBuilder().pending())
    text = 'FailedMount: secret "job-s3" not found'
    decided = plan(seen.seen(warnings=(text,)).build())
    assert condition(decided, ConditionType.READY)[2] == text


def test_a_long_problem_is_told_once() -> None:
    from lora_api.problems import Problem

    seen = ObservedBuilder().seen(problems=(Problem("spec.config", "is wrong: " + "x " * 700),))
    first = plan(seen.build())
    assert reasons(first) == ["NotAccepted"]
    second = plan(seen.with_status(first.status).build())
    assert second.events == ()
    assert second.status == first.status


def test_events_come_in_the_order_in_which_things_happened() -> None:
    run = RunBuilder().with_progress(250, resumed_from_step=200).with_checkpoints(checkpoint(200), checkpoint(240, 2))
    began = plan(running().with_status(status(stage=None)).with_run(run).build())
    assert reasons(began) == ["Started", "Resumed", "CheckpointSaved", "CheckpointSaved"]
    ended = plan(running().with_run(run.with_final()).with_child(ChildBuilder().complete()).build())
    assert reasons(ended) == ["CheckpointSaved", "CheckpointSaved", "Succeeded"]


def test_checkpoints_of_an_earlier_job_are_no_news_and_many_are_told_briefly() -> None:
    job = JobBuilder().with_output(ifExists="Continue").with_config("save", max_step_saves=9)
    theirs = [checkpoint(step, uid="other") for step in (100, 200)]
    mine = [checkpoint(step) for step in range(300, 900, 100)]
    run = RunBuilder().with_progress(850).with_checkpoints(*theirs, *mine)
    decided = plan(running(job).with_run(run).build())
    assert decided.status.checkpoints.count == 8
    saved = [event.message for event in decided.events if event.reason == "CheckpointSaved"]
    assert [text.split()[4] for text in saved] == ["600", "700", "800"]


def test_a_rejected_checkpoint_is_told_and_stays_visible() -> None:
    bad, good = checkpoint(200), checkpoint(100)
    progress = beat(120, start=2, resumed_from_step=100)
    run = RunBuilder().with_checkpoints(bad, good)._with(progress=progress).with_rejected(bad)
    decided = plan(running().with_status(status(stage="Initializing")).with_run(run).build())
    assert "The checkpoint of step 200 was not used: sha256 differs" in [event.message for event in decided.events]
    assert condition(decided, ConditionType.CHECKPOINT_GC)[1] == "CheckpointRejected"


def test_the_grace_period_follows_the_longest_save() -> None:
    interrupted = status(Kind.INTERRUPTED, "Preempted", "because", attempt=2, child_name="mascot-2", stage=None)
    seen = ObservedBuilder(profile=ProfileBuilder()).with_status(interrupted)
    run = RunBuilder().with_progress(150, save_seconds=100.2)
    *_, job = plan(seen.with_run(run).build()).create
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 331
