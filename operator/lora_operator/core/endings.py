"""What follows when an attempt has ended: the next one, or the end of the job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lora_api import names
from lora_api.job import ConditionType
from lora_operator.core.assemble import Decision
from lora_operator.core.classify import Cause, Verdict
from lora_operator.core.conditions import condition_of
from lora_operator.core.facts import all_children, has_saved, pods_in_the_way, unstopped
from lora_operator.core.memory import Remedy, remedy_for, retried_failures
from lora_operator.core.state import Kind, State
from lora_operator.core.times import format_time
from lora_operator.core.views import Event, EventType, Observed

AT_ONCE = 0.0
SOON = 5.0


def after(o: Observed, verdict: Verdict) -> Decision:
    """An attempt has ended with this verdict: the next one, or the end."""
    assert o.job is not None, "a job without a valid spec was not accepted"
    remedy = remedy_for(o, verdict) if verdict.cause is Cause.OUT_OF_MEMORY else Remedy(verdict)
    verdict = remedy.verdict
    if verdict.cause is Cause.PERMANENT:
        return fail(o, verdict)
    if remedy.shrunk is not None:
        told = warning("Shrunk", remedy.event)
        return _restart(o, verdict, updates={"shrunk": remedy.shrunk}, events=(told,))
    if verdict.cause not in (Cause.FAILURE, Cause.OUT_OF_MEMORY):
        return _after_no_fault_of_its_own(o, verdict)
    failures, limit = retried_failures(o), o.job.spec.run_policy.backoff_limit
    if failures >= limit:
        text = f"{verdict.message} (failure {failures + 1}; backoffLimit is {limit})"
        return fail(o, Verdict(verdict.cause, verdict.reason, text))
    return _restart(o, verdict, wait_seconds=backoff_seconds(o, failures))


def _after_no_fault_of_its_own(o: Observed, verdict: Verdict) -> Decision:
    """The next attempt, at once; unless one after the other is taken away before it has saved anything.

    Such a job would only keep the scheduler busy, and never have long enough.
    """
    fruitless = 0 if has_saved(o) else o.status.fruitless_restarts + 1
    if fruitless <= 1:
        return _restart(o, verdict, updates={"fruitless_restarts": fruitless})
    text = f"{verdict.message}; {fruitless} attempts in a row have saved no checkpoint"
    verdict, wait = Verdict(verdict.cause, verdict.reason, text), backoff_seconds(o, fruitless - 2)
    return _restart(o, verdict, wait_seconds=wait, updates={"fruitless_restarts": fruitless})


def _restart(
    o: Observed,
    verdict: Verdict,
    *,
    wait_seconds: float = 0.0,
    updates: dict[str, Any] | None = None,
    events: tuple[Event, ...] = (),
) -> Decision:
    """The next attempt. Its number, the count and what it does otherwise are one write.

    They are acted upon when they have been written: whoever crashes in between finds the intention.
    """
    field, at = verdict.cause.value, o.now + timedelta(seconds=wait_seconds)
    changed = {
        **next_attempt(o),
        "restarts": o.status.restarts.model_copy(update={field: getattr(o.status.restarts, field) + 1}),
        "retry_at": format_time(at, round_up=True) if wait_seconds else None,
        **(updates or {}),
    }
    event = warning("Interrupted", f"Attempt {o.status.attempt} ended: {verdict.message}")
    state = State(Kind.INTERRUPTED, verdict.reason, verdict.message)
    return Decision(state, updates=changed, requeue=AT_ONCE, events=(event, *events))


def backoff_seconds(o: Observed, failures: int) -> float:
    """Seconds before the retry after `failures` earlier ones: doubles, up to the profile's maximum."""
    if o.profile is None:
        return 10.0
    backoff = o.profile.spec.backoff
    return float(min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(failures, 30)))


def next_attempt(o: Observed) -> dict[str, Any]:
    """Status fields of the attempt after this one, which has not run yet."""
    attempt = o.status.attempt + 1
    return {"attempt": attempt, "child_name": child_name(o, attempt), "stage": None}


def child_name(o: Observed, attempt: int) -> str:
    """Name of an attempt's Job."""
    return names.child_name(o.raw["metadata"]["name"], attempt)


def fail(o: Observed, verdict: Verdict) -> Decision:
    """The job fails: at once when nothing of it runs, else when what runs has saved and stopped.

    `completionTime` without an end is the intention, see `plan`: a finished job is looked at no more, so nothing may be
    left to be stopped when it says that it has failed.
    """
    updates = {"completion_time": format_time(o.now), "stage": None, "retry_at": None}
    if unstopped(all_children(o)) or pods_in_the_way(o):
        state = State(Kind.INTERRUPTED, verdict.reason, verdict.message)
        return Decision(state, updates=updates, requeue=AT_ONCE)
    event = warning("Failed", verdict.message)
    return Decision(State(Kind.FAILED, verdict.reason, verdict.message), updates=updates, events=(event,))


def go_on_failing(o: Observed) -> Decision:
    """Stops what still runs, then fails for the reason that was written down."""
    why = condition_of(o.status, ConditionType.INTERRUPTED)
    reason, message = (why.reason, why.message) if why and why.status == "True" else ("Error", "The job has failed")
    children = unstopped(all_children(o))
    if not children and not pods_in_the_way(o):
        return fail(o, Verdict(Cause.PERMANENT, reason, message))
    return Decision(State(Kind.INTERRUPTED, reason, message), delete_children=children, requeue=SOON)


def normal(reason: str, message: str) -> Event:
    """News."""
    return Event(EventType.NORMAL, reason, message)


def warning(reason: str, message: str) -> Event:
    """Bad news."""
    return Event(EventType.WARNING, reason, message)
