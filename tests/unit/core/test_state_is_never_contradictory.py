"""Thousands of looks that no story tells: whatever is seen, a decision is made and its status makes sense."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lora_api.job import FINALIZER, ConditionType, JobStatus, Phase
from lora_api.problems import Problem
from lora_api.run import ExitWord
from lora_operator.core.conditions import holds, is_terminal
from lora_operator.core.plan import plan
from lora_operator.core.views import ChildView, Observed, Plan, PodView
from tests.unit.builders import (
    NOW,
    ChildBuilder,
    JobBuilder,
    ObservedBuilder,
    PodBuilder,
    RunBuilder,
    ago,
    checkpoint,
    final,
    word,
)

STATES = ("Queued", "Running", "Suspended", "Interrupted", "Succeeded", "Failed")
JOBS = (
    JobBuilder(),
    JobBuilder().suspended(),
    JobBuilder().with_policy(backoffLimit=0, startupDeadlineSeconds=60),
    JobBuilder().with_config("train", batch_size=6),
    JobBuilder().with_policy(oomPolicy="Fail"),
    JobBuilder().with_output(deletionPolicy="Delete"),
    JobBuilder().with_metadata(deletionTimestamp=ago(5), finalizers=[FINALIZER]),
    JobBuilder().with_metadata(deletionTimestamp=ago(5)),
)


def some_word(dice: random.Random) -> ExitWord | None:
    return dice.choice([None, *(word(code, step=7) for code in (0, 64, 75, 85, 86, 87, 1))])


def some_pod(dice: random.Random, index: int) -> PodView:
    pod = PodBuilder(index)
    match dice.randrange(7):
        case 0:
            pod.pending()
        case 1:
            pod.unschedulable("0/3 nodes")
        case 2:
            pod.pending(waiting="ImagePullBackOff: back-off")
        case 3 | 4:
            pod.ended(dice.choice([0, 1, 64, 75, 85, 137]), some_word(dice))
    if dice.random() < 0.3:
        pod.deleted(grace_over=dice.random() < 0.3)
    if dice.random() < 0.2:
        pod.disrupted()
    return pod.build()


def some_child(dice: random.Random, attempt: int) -> ChildView | None:
    child = ChildBuilder(attempt)
    match dice.randrange(8):
        case 0:
            return None
        case 1:
            child.failed()
        case 2:
            child.complete()
        case 3:
            child.suspended()
        case 4:
            child.failing("Pod x has condition DisruptionTarget")
        case 5:
            child.foreign(of_a_job=dice.random() < 0.5)
    if dice.random() < 0.1:
        child.terminating()
    return child.build()


def some_run(dice: random.Random) -> RunBuilder:
    run = RunBuilder()
    if dice.random() < 0.2:
        return run.empty()
    if dice.random() < 0.1:
        run.of_another_job()
    run.with_checkpoints(*(checkpoint(100 * n, dice.randint(1, 3)) for n in range(1, dice.randint(1, 6))))
    if dice.random() < 0.8:
        stage = dice.choice(["Initializing", "PreparingData", "Training", "Finalizing"])
        attempt, age = dice.randint(1, 3), dice.choice([1, 5, 700])
        eta = dice.choice([None, 12.5, float("inf")])
        resumed = dice.choice([None, 100])
        run.with_progress(
            dice.randint(0, 300),
            stage=stage,
            attempt=attempt,
            updated_at=ago(age),
            eta_seconds=eta,
            resumed_from_step=resumed,
            exit=some_word(dice),
        )
    if dice.random() < 0.1:
        run.with_final(final(completed_seconds_ago=dice.choice([1, 100])))
    return run


def some_look(dice: random.Random, status: JobStatus) -> Observed:
    observed = ObservedBuilder(dice.choice(JOBS)).with_status(status).with_run(some_run(dice))
    observed.seen(
        child=some_child(dice, max(1, status.attempt)),
        pods=tuple(some_pod(dice, index) for index in range(dice.randint(0, 2))),
        stray_pods=tuple(some_pod(dice, 5) for _ in range(dice.randint(0, 1))),
        other_children=tuple(filter(None, [some_child(dice, 9)])),
        now=NOW,
    )
    if dice.random() < 0.15:
        observed.store_down()
    if dice.random() < 0.1:
        observed.seen(problems=(Problem("spec.profile", "is not there"),))
    if dice.random() < 0.1:
        observed.seen(apply_error="quota exceeded")
    if dice.random() < 0.05:
        observed.seen(job=None, problems=(Problem("spec", "does not fit"),))
    seen = observed.build()
    others = tuple(child for child in seen.other_children if child.ours)
    return replace(seen, other_children=others)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_seen_the_status_makes_sense_and_a_second_look_changes_nothing_more(seed: int) -> None:
    dice = random.Random(seed)
    status = JobStatus()
    for _ in range(60):
        seen = some_look(dice, status)
        decided = plan(seen)
        new = decided.status
        true = [state for state in STATES if holds(new, ConditionType(state))]
        assert len(true) <= 1
        if new.phase not in (Phase.DELETING, Phase.PENDING, Phase.INVALID):
            assert true == [new.phase.value]
        assert holds(new, ConditionType.READY) == holds(new, ConditionType.SUCCEEDED)
        assert new.attempt - status.attempt in (0, 1) or status.attempt == 0
        assert new.restarts.total - status.restarts.total in (0, 1)
        assert status.shrunk is None or (new.shrunk is not None and new.shrunk.times - status.shrunk.times in (0, 1))
        assert all(len(condition.message) <= 512 for condition in new.conditions)
        assert len(new.model_dump_json(by_alias=True).encode()) < 8192
        if decided.requeue_after_seconds == 0.0:
            assert new != status or decided.delete_children, "no busy loop"
        if is_terminal(status) and seen.raw["metadata"].get("deletionTimestamp") is None:
            assert decided.events == ()
            assert new == status or new.observed_generation != status.observed_generation
        if not acts(seen, decided):
            again = plan(replace(seen, status=new))
            if not acts(replace(seen, status=new), again):
                third = plan(replace(seen, status=again.status))
                assert third.status == again.status, differences(again.status, third.status)
                assert {event.reason for event in third.events} <= {"Created"}
        status = JobStatus() if is_terminal(new) or dice.random() < 0.05 else new


def acts(seen: Observed, decided: Plan) -> bool:
    """Whether the world will look different afterwards."""
    moves = decided.create or decided.delete_children or decided.delete_keys or decided.finalizers is not None
    return bool(moves) or decided.status.attempt != seen.status.attempt


def differences(before: JobStatus, after: JobStatus) -> list[str]:
    pairs = zip(before.model_dump().items(), after.model_dump().items(), strict=True)
    return [f"{name}: {was} -> {now}" for (name, was), (_, now) in pairs if was != now]
