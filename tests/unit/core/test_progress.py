"""Heartbeat and ledger as status fields."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lora_api.job import JobStatus
from lora_operator.core.conditions import merge_conditions
from lora_operator.core.progress import (
    checkpoints_status,
    finished_progress,
    hold_back_progress,
    latest_progress,
    output_status,
    percent,
    progress_status,
)
from lora_operator.core.retention import plan_retention
from lora_operator.core.state import Kind, State, facts_of
from tests.unit.builders import LOCATION, NOW, RunBuilder, ago, beat, checkpoint, final


def shown(kind: Kind, step: int, message: str = "", seconds_ago: float = 1) -> JobStatus:
    conditions = merge_conditions((), facts_of(State(kind, "Why", message)), 1, NOW)
    return JobStatus(conditions=conditions, progress=progress_status(beat(step, updated_at=ago(seconds_ago))))


def test_a_heartbeat_becomes_text_and_whole_numbers() -> None:
    status = progress_status(beat(150, loss=0.123456, learning_rate=1e-4, steps_per_second=1.2345, eta_seconds=4320.4))
    assert (status.percent, status.loss, status.learning_rate, status.steps_per_second) == (
        "50%",
        "0.1235",
        "0.0001",
        "1.23",
    )
    assert (status.eta_seconds, status.eta) == (4320, "1h12m")


@pytest.mark.parametrize("seconds", [None, float("inf"), float("nan")])
def test_a_time_of_arrival_that_is_no_number_is_not_shown(seconds: float | None) -> None:
    status = progress_status(beat(1, eta_seconds=seconds, loss=float("nan")))
    assert (status.eta_seconds, status.eta, status.loss) == (None, None, "nan")


@pytest.mark.parametrize(
    ("step", "steps", "text"),
    [(0, 0, "0%"), (299, 300, "99%"), (300, 300, "100%"), (400, 300, "100%"), (1, 1000, "0%")],
)
def test_a_hundred_percent_is_shown_only_when_all_is_done(step: int, steps: int, text: str) -> None:
    assert percent(step, steps) == text


def test_a_start_that_prepares_does_not_take_the_step_back() -> None:
    before = progress_status(beat(250))
    assert latest_progress(before, beat(0, stage="Initializing"), running=True) == before
    assert latest_progress(before, beat(200, stage="PreparingData"), running=True) == before
    assert latest_progress(before, beat(201, stage="Training"), running=True).step == 201
    assert latest_progress(None, beat(0, stage="Initializing"), running=True).step == 0


def test_what_stands_still_has_no_time_of_arrival() -> None:
    assert latest_progress(None, beat(100), running=False).eta is None
    assert latest_progress(progress_status(beat(9)), beat(0, stage="Initializing"), running=False).eta is None


def test_a_finished_job_keeps_its_last_loss_even_if_it_was_never_seen_before() -> None:
    status = finished_progress(None, beat(290, loss=0.25), final())
    assert (status.step, status.steps, status.percent, status.loss, status.eta) == (300, 300, "100%", "0.2500", "0s")
    assert finished_progress(progress_status(beat(200)), None, final()).step == 300
    assert finished_progress(None, None, final()).step == 300


def test_progress_alone_waits_and_anything_else_does_not() -> None:
    old = shown(Kind.RUNNING, 100)
    assert hold_back_progress(old, shown(Kind.RUNNING, 101), NOW) == old
    assert hold_back_progress(old, shown(Kind.RUNNING, 101), NOW + timedelta(seconds=9)).progress.step == 101  # type: ignore[union-attr]
    moved = shown(Kind.INTERRUPTED, 101)
    assert hold_back_progress(old, moved, NOW) == moved
    saved = shown(Kind.RUNNING, 101).model_copy(update={"lost_steps": 3})
    assert hold_back_progress(old, saved, NOW) == saved


def test_words_of_a_running_job_wait_with_its_progress_and_those_of_a_waiting_one_do_not() -> None:
    old = shown(Kind.RUNNING, 100, "encoding 1/12")
    assert hold_back_progress(old, shown(Kind.RUNNING, 100, "encoding 2/12"), NOW) == old
    waits = shown(Kind.QUEUED, 100, "0/3 nodes")
    other = shown(Kind.QUEUED, 100, "0/4 nodes")
    assert hold_back_progress(waits, other, NOW) == other


def test_a_trainers_clock_that_is_ahead_does_not_freeze_its_progress() -> None:
    old = shown(Kind.RUNNING, 100, seconds_ago=-3600)
    assert hold_back_progress(old, shown(Kind.RUNNING, 150, seconds_ago=-3700), NOW).progress.step == 150  # type: ignore[union-attr]


def test_the_ledger_lists_the_newest_twenty_and_counts_all() -> None:
    run = RunBuilder().with_checkpoints(*(checkpoint(step) for step in range(10, 310, 10))).build()
    status = checkpoints_status(run, plan_retention(run, 25, NOW), removed=7)
    assert (status.count, status.newest_step, status.removed, len(status.entries)) == (25, 300, 7, 20)
    assert status.location == LOCATION + "checkpoints/"


def test_outputs_are_named_by_their_place() -> None:
    made = final(samples=tuple(f"{n:02}.png" for n in range(12)))
    status = output_status(RunBuilder().build(), made)
    assert status.adapter == LOCATION + "final/mascot.safetensors"
    assert len(status.samples) == 8
    assert output_status(RunBuilder().build(), None).adapter is None
