"""What every pass does besides its rule."""

from __future__ import annotations

from datetime import timedelta

from lora_api.job import JobStatus, OutputStatus
from lora_api.run import Control
from lora_operator.core.assemble import Decision, assemble
from lora_operator.core.conditions import merge_conditions
from lora_operator.core.state import Kind, State, facts_of
from lora_operator.core.views import Plan
from tests.unit.builders import (
    NOW,
    ChildBuilder,
    JobBuilder,
    ObservedBuilder,
    PodBuilder,
    RunBuilder,
    checkpoint,
    final,
)

RUNS = State(Kind.RUNNING, "Training", "1 pod runs on node-0")


def assembled(observed: ObservedBuilder, decision: Decision | None = None) -> Plan:
    return assemble(observed.build(), decision or Decision(RUNS, updates={"stage": "Training"}))


def control_of(job: JobBuilder, **changes: object) -> Control:
    config = job.build().spec.config
    known = {
        "generation": 1,
        "steps": config.train.steps,
        "lr": config.train.lr,
        "save_every": config.save.save_every,
        "max_step_saves": config.save.max_step_saves,
        "sample": config.sample.model_dump(mode="json"),
        "save": config.save.model_dump(mode="json"),
    }
    return Control.model_validate_json(Control.model_validate({**known, **changes}).model_dump_json(by_alias=True))


def test_control_is_put_when_the_spec_says_something_else_and_only_then() -> None:
    job = JobBuilder().with_config("sample", prompts=["a [trigger]"])
    same = RunBuilder().with_control(control_of(job))
    assert assembled(ObservedBuilder(job).with_run(same)).put_control is None
    seen_later = RunBuilder().with_control(control_of(job, generation=9))
    assert assembled(ObservedBuilder(job).with_run(seen_later)).put_control is None
    changes: tuple[dict[str, object], ...] = (
        {"steps": 9},
        {"lr": 0.5},
        {"save_every": 7},
        {"max_step_saves": 1},
        {"sample": {}},
        {"save": {}},
    )
    for change in changes:
        other = RunBuilder().with_control(control_of(job, **change))
        assert assembled(ObservedBuilder(job).with_run(other)).put_control == control_of(job)
    assert assembled(ObservedBuilder(job).with_run(RunBuilder())).put_control == control_of(job)


def test_control_is_not_put_where_nobody_or_somebody_else_reads_it() -> None:
    for run in (
        RunBuilder().empty(),
        RunBuilder().of_another_job(),
        RunBuilder().with_final(),
    ):
        assert assembled(ObservedBuilder().with_run(run)).put_control is None
    assert assembled(ObservedBuilder().store_down()).put_control is None
    deleting = Decision(State(Kind.DELETING, "Deleting"))
    assert assembled(ObservedBuilder().with_run(RunBuilder()), deleting).put_control is None


def test_nothing_is_deleted_from_another_jobs_directory_nor_while_a_job_is_deleted() -> None:
    many = [checkpoint(step) for step in range(100, 900, 100)]
    theirs = RunBuilder().of_another_job().with_checkpoints(*many)
    assert assembled(ObservedBuilder().with_run(theirs)).delete_keys == ()
    mine = ObservedBuilder().with_run(RunBuilder().with_checkpoints(*many))
    assert assembled(mine).delete_keys != ()
    assert assembled(mine, Decision(State(Kind.DELETING, "Deleting"))).delete_keys == ()
    assert assembled(mine.seen(store_error="delete: refused")).delete_keys == ()


def test_lost_steps_are_taken_over_when_training_goes_on_and_told_with_it() -> None:
    status = JobStatus(attempt=1, child_name="mascot-1", lost_steps=10)
    preparing = RunBuilder().with_progress(0, stage="Initializing", lost_steps=60, resumed_from_step=100)
    decided = assembled(ObservedBuilder().with_status(status).with_run(preparing), Decision(RUNS))
    assert decided.status.lost_steps == 10
    trains = RunBuilder().with_progress(101, lost_steps=60, resumed_from_step=100)
    decided = assembled(ObservedBuilder().with_status(status).with_run(trains))
    assert decided.status.lost_steps == 60
    assert decided.events[-1].message == "Resumed from the checkpoint of step 100; 50 steps are done again"
    one = RunBuilder().with_progress(101, lost_steps=11, resumed_from_step=100)
    decided = assembled(ObservedBuilder().with_status(status).with_run(one))
    assert decided.events[-1].message.endswith("; 1 step is done again")


def test_jobs_of_earlier_attempts_are_stopped_and_the_last_one_kept_for_its_logs() -> None:
    status = JobStatus(attempt=4, child_name="mascot-4")
    others = [ChildBuilder(1).failed(), ChildBuilder(2).terminating(), ChildBuilder(3).failed()]
    seen = ObservedBuilder().with_status(status).with_child(ChildBuilder(4), PodBuilder())
    assert assembled(seen.with_others(others)).delete_children == (("mascot-1", "child-1"),)
    running = [ChildBuilder(3)]
    assert assembled(seen.with_others(running)).delete_children == (("mascot-3", "child-3"),)


def test_a_status_that_would_be_too_big_leaves_out_what_can_be_read_elsewhere() -> None:
    many = [checkpoint(step) for step in range(1000, 1030)]
    samples = tuple("s" * 700 + f"{n}.png" for n in range(8))
    run = RunBuilder().with_checkpoints(*many).with_final(final(samples=samples))
    job = JobBuilder().with_config("save", max_step_saves=1000)
    words = State(Kind.FAILED, "Error", "ü" * 600)
    decided = assembled(ObservedBuilder(job).with_run(run), Decision(words))
    size = len(decided.status.model_dump_json(by_alias=True, exclude_none=True).encode())
    assert size <= 8000
    assert decided.status.checkpoints.count == 30
    assert decided.status.checkpoints.newest_step == 1029
    assert decided.status.output.adapter is not None
    again = ObservedBuilder(job).with_run(run).with_status(decided.status)
    assert assembled(again, Decision(words)).status == decided.status
    assert [e.reason for e in assembled(again, Decision(words)).events] == []


def test_a_job_that_is_deleted_after_its_end_still_says_how_it_ended() -> None:
    conditions = merge_conditions((), facts_of(State(Kind.SUCCEEDED, "Completed", "done")), 1, NOW - timedelta(days=1))
    over = JobStatus(attempt=1, conditions=conditions, output=OutputStatus(location="s3://x/", adapter="s3://x/a"))
    decided = assembled(ObservedBuilder().with_status(over), Decision(State(Kind.DELETING, "Deleting", "going")))
    assert decided.status.phase == "Deleting"
    assert decided.status.output == over.output
    changed = [c.type for c, old in zip(decided.status.conditions, conditions, strict=True) if c.status != old.status]
    assert changed == ["Reconciling"]
