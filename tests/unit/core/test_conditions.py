"""Conditions and phase: derived, and stable where nothing has changed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lora_api.job import ConditionType, JobStatus, Phase
from lora_operator.core.conditions import Fact, condition_of, holds, is_terminal, merge_conditions, phase_of, shorten
from lora_operator.core.state import Kind, State, facts_of, waiting_state
from lora_operator.core.times import format_bytes, format_duration, format_time, parse_time
from tests.unit.builders import NOW

LATER = NOW + timedelta(minutes=5)


def status_in(kind: Kind, reason: str = "Why", message: str = "because") -> JobStatus:
    return JobStatus(conditions=merge_conditions((), facts_of(State(kind, reason, message)), 1, NOW))


def test_the_time_of_a_transition_moves_when_the_status_flips_and_only_then() -> None:
    before = merge_conditions((), [Fact(ConditionType.RUNNING, True, "Training", "1 pod")], 1, NOW)
    same = merge_conditions(before, [Fact(ConditionType.RUNNING, True, "Finalizing", "2 pods")], 2, LATER)
    flipped = merge_conditions(same, [Fact(ConditionType.RUNNING, False, "Interrupted")], 2, LATER)
    assert same[0].last_transition_time == format_time(NOW)
    assert (same[0].reason, same[0].message, same[0].observed_generation) == ("Finalizing", "2 pods", 2)
    assert flipped[0].last_transition_time == format_time(LATER)


def test_a_condition_without_a_fact_stays_and_the_order_is_fixed() -> None:
    before = merge_conditions((), [Fact(ConditionType.CHECKPOINT_GC, True, "UpToDate")], 1, NOW)
    after = merge_conditions(before, [Fact(ConditionType.READY, False, "x")], 1, LATER)
    assert [condition.type for condition in after] == [ConditionType.READY, ConditionType.CHECKPOINT_GC]


def test_what_a_trainer_or_a_kubelet_says_is_made_legal() -> None:
    fact = Fact(ConditionType.FAILED, True, "Bad reason: " + "x" * 300, "two\nlines of " + "y" * 900)
    made = merge_conditions((), [fact], 1, NOW)[0]
    assert made.reason.startswith("Badreason")
    assert len(made.reason) == 128
    assert len(made.message) == 512
    assert "\n" not in made.message
    assert merge_conditions((), [Fact(ConditionType.FAILED, True, ":")], 1, NOW)[0].reason == "Unknown"


def test_the_same_error_reads_the_same_whatever_address_its_object_has() -> None:
    assert shorten("conn object at 0x7f3a>: refused") == shorten("conn object at 0x11bc>: refused")


@pytest.mark.parametrize("kind", Kind)
def test_a_state_makes_conditions_that_can_not_contradict_each_other(kind: Kind) -> None:
    status = status_in(kind)
    states = [ConditionType(name) for name in ("Queued", "Running", "Suspended", "Interrupted", "Succeeded", "Failed")]
    true = [state.value for state in states if holds(status, state)]
    assert true == ([kind.value] if kind.value in states else [])
    assert holds(status, ConditionType.READY) == (kind is Kind.SUCCEEDED)
    assert holds(status, ConditionType.STALLED) == (kind in (Kind.FAILED, Kind.INVALID))
    assert not (holds(status, ConditionType.STALLED) and holds(status, ConditionType.RECONCILING))
    assert is_terminal(status) == (kind in (Kind.SUCCEEDED, Kind.FAILED))
    assert holds(status, ConditionType.ACCEPTED) == (kind is not Kind.INVALID)
    assert all(condition.reason for condition in status.conditions)
    phase = phase_of(status, invalid=kind is Kind.INVALID, deleting=kind is Kind.DELETING)
    assert phase == (Phase.PENDING if kind is Kind.SUSPENDING else Phase(kind.value))


def test_an_interrupted_job_stays_so_and_says_what_it_waits_for() -> None:
    status = status_in(Kind.INTERRUPTED, "Preempted", "Pod x: preempted; saved at step 9")
    for waits_for in ("attempt 2 is starting", "no place", "no place"):
        state = waiting_state(status, Kind.QUEUED, "Unschedulable", waits_for)
        assert (state.kind, state.reason) == (Kind.INTERRUPTED, "Preempted")
        assert state.message == f"Pod x: preempted; saved at step 9 — {waits_for}"
        status = JobStatus(conditions=merge_conditions(status.conditions, facts_of(state), 1, LATER))


def test_a_long_reason_leaves_room_for_what_is_waited_for() -> None:
    status = status_in(Kind.INTERRUPTED, "Error", "e" * 2000)
    for _ in range(3):
        state = waiting_state(status, Kind.PENDING, "BackingOff", "the next attempt begins at noon")
        status = JobStatus(conditions=merge_conditions(status.conditions, facts_of(state), 1, LATER))
        condition = condition_of(status, ConditionType.INTERRUPTED)
        assert condition is not None
        assert condition.message.endswith("… — the next attempt begins at noon")


def test_a_job_that_was_not_interrupted_is_in_the_state_itself() -> None:
    assert waiting_state(JobStatus(), Kind.QUEUED, "Unschedulable", "no place").kind is Kind.QUEUED


def test_times_and_sizes_are_written_for_people() -> None:
    assert [format_duration(s) for s in (-3, 5, 185, 4320, 183600)] == ["0s", "5s", "3m05s", "1h12m", "2d03h"]
    assert [format_bytes(n) for n in (812, 1_400_000, 3 * 10**15)] == ["812 B", "1.4 MB", "3000.0 TB"]
    half = NOW + timedelta(seconds=0.5)
    assert format_time(half) == "2026-01-01T12:00:00Z"
    assert format_time(half, round_up=True) == "2026-01-01T12:00:01Z"
    assert parse_time("2026-01-01T13:00:00.5+01:00") == half
    assert parse_time(None) is parse_time("soon") is parse_time("2026-01-01T12:00:00") is None
