"""The one state a job is in, and the conditions that follow from it.

Rules decide a `State`; the conditions are derived from it in one place, so they can't contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lora_api.job import ConditionType, JobStatus
from lora_operator.core.conditions import Fact, condition_of, holds, shorten

_WHY_LIMIT = 300  # of a message, so that what is waited for is read, too
_PARTS = " — "


class Kind(StrEnum):
    """Where a job stands."""

    INVALID = "Invalid"
    PENDING = "Pending"
    QUEUED = "Queued"
    RUNNING = "Running"
    INTERRUPTED = "Interrupted"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETING = "Deleting"


@dataclass(frozen=True)
class State:
    """Where a job stands, why (one CamelCase word), and a sentence for people."""

    kind: Kind
    reason: str
    message: str = ""
    accepted: bool | None = True  # None: not known, because the store could not be asked


_SAME_NAME = {
    ConditionType.QUEUED: Kind.QUEUED,
    ConditionType.RUNNING: Kind.RUNNING,
    ConditionType.SUSPENDED: Kind.SUSPENDED,
    ConditionType.INTERRUPTED: Kind.INTERRUPTED,
    ConditionType.SUCCEEDED: Kind.SUCCEEDED,
    ConditionType.FAILED: Kind.FAILED,
}
_ENDED = (Kind.SUCCEEDED, Kind.FAILED)
_NEEDS_A_PERSON = (Kind.INVALID, Kind.FAILED)


def facts_of(state: State) -> list[Fact]:
    """Every condition but CheckpointGC, which has its own truth."""
    facts = [_accepted(state)]
    for condition, kind in _SAME_NAME.items():
        it_is = state.kind is kind
        facts.append(
            Fact(condition, it_is, state.reason if it_is else state.kind.value, state.message if it_is else "")
        )
    done = state.kind is Kind.SUCCEEDED
    busy = state.kind not in (*_ENDED, Kind.INVALID, Kind.SUSPENDED)
    stuck = state.kind in _NEEDS_A_PERSON
    facts.append(Fact(ConditionType.READY, done, state.reason, state.message))
    facts.append(Fact(ConditionType.RECONCILING, busy, state.reason if busy else state.kind.value))
    facts.append(
        Fact(ConditionType.STALLED, stuck, state.reason if stuck else "Progressing" if busy else state.kind.value)
    )
    return facts


def _accepted(state: State) -> Fact:
    if state.kind is Kind.INVALID:
        return Fact(ConditionType.ACCEPTED, False, state.reason, state.message)
    if state.accepted is None:
        return Fact(ConditionType.ACCEPTED, None, state.reason, state.message)
    return Fact(ConditionType.ACCEPTED, True, "Valid", "The manifest, its profile and its store are in order")


def waiting_state(status: JobStatus, kind: Kind, reason: str, message: str) -> State:
    """A job that was interrupted stays so until it runs again; what it waits for is put into the message."""
    if not holds(status, ConditionType.INTERRUPTED):
        return State(kind, reason, message)
    before = condition_of(status, ConditionType.INTERRUPTED)
    assert before is not None, "holds() has seen it"
    why = shorten(before.message.partition(_PARTS)[0], _WHY_LIMIT)
    return State(Kind.INTERRUPTED, before.reason, f"{why}{_PARTS}{message}" if message else why)
