"""`status.conditions` and `status.phase`: derived, so that they can't contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from lora_api.job import Condition, ConditionType, JobStatus, Phase
from lora_operator.core.times import format_time

_MESSAGE_LIMIT = 512  # eleven conditions stay well under the 8 kB that a status may have
_REASON_LIMIT = 128
_NOT_IN_REASONS = re.compile(r"[^A-Za-z0-9_]")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object in memory: never the same twice


@dataclass(frozen=True)
class Fact:
    """What a condition should say now."""

    type: ConditionType
    holds: bool | None
    reason: str
    message: str = ""


def merge_conditions(
    old: tuple[Condition, ...], facts: Iterable[Fact], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Takes the facts over; `lastTransitionTime` moves only when `status` flips. Conditions without a fact stay."""
    by_type = {condition.type: condition for condition in old}
    for fact in facts:
        status: Literal["True", "False", "Unknown"] = {True: "True", False: "False", None: "Unknown"}[fact.holds]  # type: ignore[assignment]
        before = by_type.get(fact.type)
        moved = before is None or before.status != status
        by_type[fact.type] = Condition(
            type=fact.type,
            status=status,
            reason=_word(fact.reason),
            message=shorten(fact.message),
            last_transition_time=format_time(now) if moved or before is None else before.last_transition_time,
            observed_generation=generation,
        )
    return tuple(by_type[kind] for kind in ConditionType if kind in by_type)


def _word(reason: str) -> str:
    """A legal reason, whatever a trainer or a kubelet said."""
    return _NOT_IN_REASONS.sub("", reason)[:_REASON_LIMIT] or "Unknown"


def shorten(message: str, limit: int = _MESSAGE_LIMIT) -> str:
    """One line of at most `limit` characters, the same for the same fact."""
    line = " ".join(_ADDRESS.sub("", message).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def condition_of(status: JobStatus, kind: ConditionType) -> Condition | None:
    """The condition of that type, if it is there."""
    return next((condition for condition in status.conditions if condition.type == kind), None)


def holds(status: JobStatus, kind: ConditionType) -> bool:
    """Whether the condition is there and True."""
    condition = condition_of(status, kind)
    return condition is not None and condition.status == "True"


def is_terminal(status: JobStatus) -> bool:
    """Whether the job has ended for good."""
    return holds(status, ConditionType.SUCCEEDED) or holds(status, ConditionType.FAILED)


_PHASES = (
    (ConditionType.SUCCEEDED, Phase.SUCCEEDED),
    (ConditionType.FAILED, Phase.FAILED),
    (ConditionType.SUSPENDED, Phase.SUSPENDED),
    (ConditionType.RUNNING, Phase.RUNNING),
    (ConditionType.INTERRUPTED, Phase.INTERRUPTED),
    (ConditionType.QUEUED, Phase.QUEUED),
)


def phase_of(status: JobStatus, *, invalid: bool, deleting: bool) -> Phase:
    """The one word for people, from the conditions."""
    if deleting:
        return Phase.DELETING
    if invalid and not is_terminal(status):
        return Phase.INVALID
    return next((phase for kind, phase in _PHASES if holds(status, kind)), Phase.PENDING)
