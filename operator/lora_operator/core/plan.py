"""The decision: one pure function of one frozen `Observed`.

`RULES` read from the top like a specification; the first rule that applies decides the state and the actions.
What every pass does besides (progress, ledger, retention, conditions) is in `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from lora_api import names
from lora_api.job import FINALIZER, ConditionType, JobStatus
from lora_operator.core.assemble import Decision, assemble
from lora_operator.core.classify import Cause, Evidence, Verdict, classify_end, has_ended
from lora_operator.core.conditions import condition_of, holds, is_terminal
from lora_operator.core.manifests import build_attempt
from lora_operator.core.progress import finished_progress
from lora_operator.core.state import Kind, State, waiting_state
from lora_operator.core.times import format_duration, format_time, parse_time
from lora_operator.core.validate import problems_of_run
from lora_operator.core.views import ChildView, Event, EventType, Observed, Plan, PodView

_AT_ONCE = 0.0
_SOON = 5.0
_LATER = 30.0


def plan(observed: Observed) -> Plan:
    """What to do now."""
    for rule in RULES:
        decision = rule(observed)
        if decision is not None:
            return assemble(observed, decision)
    raise AssertionError("the last rule always decides")


def _it_is_being_deleted(o: Observed) -> Decision | None:
    metadata = o.raw["metadata"]
    if metadata.get("deletionTimestamp") is None:
        return None
    children = tuple((child.name, child.uid) for child in _all_children(o) if not child.terminating)
    finalizers = tuple(metadata.get("finalizers") or ())
    state = State(Kind.DELETING, "Deleting", "The job is being deleted")
    if FINALIZER not in finalizers:
        return Decision(state)  # owner references do the rest
    if _living(o.pods + o.stray_pods) or children:
        return Decision(state, delete_children=children, requeue=_SOON)
    if o.store_error and o.run is None and o.store is not None:
        return Decision(
            state,
            requeue=_LATER,
            events=(_warning("DeleteWaits", f"The run directory can't be deleted: {o.store_error}"),),
        )
    ours = o.run is not None and o.run.owner is not None and o.run.owner.uid == metadata.get("uid")
    return Decision(state, delete_run=ours, finalizers=tuple(name for name in finalizers if name != FINALIZER))


def _it_has_ended_for_good(o: Observed) -> Decision | None:
    if not is_terminal(o.status):
        return None
    kind = Kind.SUCCEEDED if holds(o.status, ConditionType.SUCCEEDED) else Kind.FAILED
    condition = condition_of(o.status, ConditionType(kind.value))
    assert condition is not None, "is_terminal() has seen it"
    leftovers = [child for child in _all_children(o) if not child.finished and not child.terminating]
    stop = tuple((child.name, child.uid) for child in leftovers if kind is Kind.FAILED)
    return Decision(State(kind, condition.reason, condition.message), delete_children=stop, frozen=True)


def _the_result_is_there(o: Observed) -> Decision | None:
    if o.job is None or o.run is None or o.run.final is None or problems_of_run(o.job, o.run):
        return None
    final = o.run.final
    text = f"Trained {final.step} steps; the adapter is {o.run.location}final/{final.adapter}"
    updates = {
        "progress": finished_progress(o.status.progress, final),
        "completion_time": o.status.completion_time or format_time(o.now),
        "start_time": o.status.start_time or format_time(o.now),
        "stage": None,
        "retry_at": None,
    }
    return Decision(State(Kind.SUCCEEDED, "Completed", text), updates=updates, events=(_normal("Succeeded", text),))


def _it_can_not_be_accepted(o: Observed) -> Decision | None:
    if o.child is not None and o.child.ours and o.job is not None:
        return None  # it runs; what it was started from is a copy
    problems = [*o.problems, *(problems_of_run(o.job, o.run) if o.job and o.run else ())]
    if not problems:
        return None
    text = "; ".join(map(str, problems))
    before = condition_of(o.status, ConditionType.ACCEPTED)
    news = before is None or before.status != "False" or before.message != text
    reason = "InvalidSpec" if o.job is None else "NotAccepted"
    events = (_warning(reason, text),) if news else ()
    return Decision(State(Kind.INVALID, reason, text), requeue=_LATER if o.job else None, events=events)


def _the_name_is_taken(o: Observed) -> Decision | None:
    if o.child is None or o.child.ours:
        return None
    text = f"A Job named {o.child.name} exists and belongs to somebody else; delete or rename it, or rename this job"
    return Decision(
        State(Kind.INVALID, "NameTaken", text), requeue=_LATER, events=_once(o.status, _warning("NameTaken", text))
    )


def _it_is_suspended(o: Observed) -> Decision | None:
    if o.job is None or not o.job.spec.run_policy.suspend:
        return None
    live = _living(o.pods + o.stray_pods)
    if o.child is not None and not o.child.finished:
        text = "Suspended by spec.runPolicy.suspend; saving and stopping"
        return Decision(
            State(Kind.SUSPENDING, "Suspending", text), updates=_next_attempt(o.status, o), requeue=_AT_ONCE
        )
    if live:
        return Decision(
            State(Kind.SUSPENDING, "Suspending", f"{len(live)} pods are saving and stopping"), requeue=_SOON
        )
    text = "Suspended by spec.runPolicy.suspend; set it to false to go on"
    news = () if holds(o.status, ConditionType.SUSPENDED) else (_normal("Suspended", text),)
    return Decision(State(Kind.SUSPENDED, "Suspended", text), updates={"stage": None}, events=news)


def _it_was_never_started(o: Observed) -> Decision | None:
    if o.status.attempt > 0:
        return None
    if o.run is None:
        text = f"The store can't be reached: {o.store_error}"
        return Decision(State(Kind.PENDING, "StoreUnavailable", text, accepted=None), requeue=_SOON)
    text = "The manifest, its profile and its store are in order"
    first = {"attempt": 1, "child_name": _child_name(o, 1), "start_time": format_time(o.now)}
    return Decision(
        State(Kind.PENDING, "Accepted", text), updates=first, requeue=_AT_ONCE, events=(_normal("Accepted", text),)
    )


def _its_attempt_has_ended(o: Observed) -> Decision | None:
    vanished = o.child is None and holds(o.status, ConditionType.RUNNING) and not _living(o.pods)
    if not vanished and (o.child is None or not has_ended(o.child, o.pods)):
        return None
    if o.run is None:  # whether it has finished is written in the store
        text = f"The attempt has ended; the store that knows its result can't be reached: {o.store_error}"
        return Decision(waiting_state(o.status, Kind.PENDING, "StoreUnavailable", text), requeue=_SOON)
    beat = o.run.progress
    word = beat.exit if beat and beat.attempt == o.status.attempt else None
    return _after(o, classify_end(Evidence(o.child, o.pods, word)))


def _it_has_stalled(o: Observed) -> Decision | None:
    limit = o.job.spec.run_policy.stall_timeout_seconds if o.job else 0
    running = [pod for pod in o.pods if pod.phase == "Running" and pod.started_at and not pod.terminating]
    if not limit or not running or o.run is None or o.child is None:
        return None
    beat = o.run.progress
    mine = beat if beat and beat.attempt == o.status.attempt and beat.exit is None else None
    seen = parse_time(mine.updated_at) if mine else None
    last_sign = max([moment for moment in (seen, *(pod.started_at for pod in running)) if moment is not None])
    if o.now - last_sign <= timedelta(seconds=limit):
        return None
    step = f" at step {mine.step}" if mine else ""
    text = f"No heartbeat{step} for {format_duration((o.now - last_sign).total_seconds())}; the limit is stallTimeoutSeconds: {limit}"
    return _after(o, Verdict(Cause.FAILURE, "NoProgress", text))


def _it_waits_to_be_created(o: Observed) -> Decision | None:
    if o.child is not None:
        return None
    assert o.job is not None, "a job without a valid spec was not accepted"
    retry_at = parse_time(o.status.retry_at)
    if retry_at is not None and o.now < retry_at:
        wait = (retry_at - o.now).total_seconds()
        return Decision(
            waiting_state(o.status, Kind.PENDING, "BackingOff", f"the next attempt begins at {o.status.retry_at}"),
            requeue=wait,
        )
    if o.apply_error:
        state = waiting_state(o.status, Kind.PENDING, "CreateRefused", o.apply_error)
        return Decision(
            state, create=_attempt(o), requeue=_LATER, events=_once(o.status, _warning("CreateRefused", o.apply_error))
        )
    waiting = [pod for pod in _living(o.pods + o.stray_pods) if not pod.grace_over]
    if waiting or _unfinished_others(o):
        text = f"waiting for {len(waiting)} pods of an earlier attempt to end"
        return Decision(waiting_state(o.status, Kind.PENDING, "Stopping", text), requeue=_SOON)
    text = f"attempt {o.status.attempt} is created"
    created = _normal("Created", f"Created attempt {o.status.attempt} as Job {o.status.child_name}")
    return Decision(
        waiting_state(o.status, Kind.PENDING, "Created", text),
        updates={"retry_at": None},
        create=_attempt(o),
        requeue=_SOON,
        events=(created,),
    )


def _kueue_holds_it(o: Observed) -> Decision | None:
    if o.child is None or not o.child.suspended:
        return None
    text = "waiting for its queue to admit it"
    if not holds(o.status, ConditionType.RUNNING):
        return Decision(waiting_state(o.status, Kind.QUEUED, "AwaitingAdmission", text))
    restarts = o.status.restarts.model_copy(update={"preemption": o.status.restarts.preemption + 1})
    state = State(Kind.INTERRUPTED, "QuotaReclaimed", f"The queue took its quota back — {text}")
    return Decision(
        state, updates={"restarts": restarts, "stage": None}, events=(_warning("Interrupted", state.message),)
    )


def _it_runs(o: Observed) -> Decision | None:
    running = [pod for pod in o.pods if pod.phase == "Running" and pod.exit_code is None]
    if not running:
        return None
    stopping = [pod for pod in running if pod.terminating]
    if stopping:
        why = stopping[0].disrupted or "it was deleted"
        return Decision(
            State(Kind.RUNNING, "Stopping", f"Pod {stopping[0].name} is being stopped ({why}); saving"), requeue=_SOON
        )
    beat = o.run.progress if o.run else None
    stage = beat.stage if beat and beat.attempt == o.status.attempt and beat.exit is None else "Initializing"
    where = ", ".join(sorted({pod.node for pod in running if pod.node})) or "this machine"
    detail = f": {beat.detail}" if beat and beat.detail and stage == beat.stage else ""
    began = (
        ()
        if holds(o.status, ConditionType.RUNNING)
        else (_normal("Started", f"Attempt {o.status.attempt} runs on {where}"),)
    )
    return Decision(
        State(Kind.RUNNING, stage, f"{len(running)} pods run on {where}{detail}"),
        updates={"stage": stage},
        requeue=_SOON,
        events=began,
    )


def _it_waits_for_its_pods(o: Observed) -> Decision:
    assert o.job is not None, "a job without a valid spec was not accepted"
    state = _why_pods_wait(o)
    limit = o.job.spec.run_policy.startup_deadline_seconds
    created_at = o.child.created_at if o.child else None
    if limit and created_at and o.now - created_at > timedelta(seconds=limit):
        text = f"No pod started within startupDeadlineSeconds: {limit}; {state.message}"
        return _failed(o, Verdict(Cause.PERMANENT, "StartupDeadlineExceeded", text))
    return Decision(state, requeue=_SOON)


def _why_pods_wait(o: Observed) -> State:
    for pod in o.pods:
        if pod.unschedulable is not None:
            return waiting_state(o.status, Kind.QUEUED, "Unschedulable", f"Pod {pod.name}: {pod.unschedulable}")
        if pod.waiting is not None:
            return waiting_state(
                o.status, Kind.PENDING, pod.waiting.partition(":")[0], f"Pod {pod.name}: {pod.waiting}"
            )
    if o.warnings:
        return waiting_state(o.status, Kind.PENDING, "PodWarning", o.warnings[0])
    return waiting_state(o.status, Kind.PENDING, "Starting", f"attempt {o.status.attempt} is starting")


RULES: tuple[Callable[[Observed], Decision | None], ...] = (
    _it_is_being_deleted,
    _it_has_ended_for_good,
    _the_result_is_there,
    _it_can_not_be_accepted,
    _the_name_is_taken,
    _it_is_suspended,
    _it_was_never_started,
    _its_attempt_has_ended,
    _it_has_stalled,
    _it_waits_to_be_created,
    _kueue_holds_it,
    _it_runs,
    _it_waits_for_its_pods,
)


def _after(o: Observed, verdict: Verdict) -> Decision:
    """An attempt has ended with this verdict: the next one, or the end."""
    assert o.job is not None, "a job without a valid spec was not accepted"
    failures = o.status.restarts.failure + o.status.restarts.out_of_memory
    limit = o.job.spec.run_policy.backoff_limit
    if verdict.cause is Cause.PERMANENT:
        return _failed(o, verdict)
    counted = verdict.cause in (Cause.FAILURE, Cause.OUT_OF_MEMORY)
    if counted and failures >= limit:
        return _failed(
            o,
            Verdict(
                verdict.cause, verdict.reason, f"{verdict.message} (failure {failures + 1}; backoffLimit is {limit})"
            ),
        )
    wait = backoff_seconds(o, failures) if counted else 0.0
    restarts = o.status.restarts.model_copy(
        update={verdict.cause.value: getattr(o.status.restarts, verdict.cause.value) + 1}
    )
    updates = {
        **_next_attempt(o.status, o),
        "restarts": restarts,
        "restarts_total": restarts.total,
        "retry_at": format_time(o.now + timedelta(seconds=wait)) if wait else None,
    }
    event = _warning("Interrupted", f"Attempt {o.status.attempt} ended: {verdict.message}")
    return Decision(
        State(Kind.INTERRUPTED, verdict.reason, verdict.message), updates=updates, requeue=_AT_ONCE, events=(event,)
    )


def backoff_seconds(o: Observed, failures: int) -> float:
    """Seconds before the retry after `failures` earlier ones: doubles, up to the profile's maximum."""
    if o.profile is None:
        return 10.0
    backoff = o.profile.spec.backoff
    return float(min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(failures, 30)))


def _failed(o: Observed, verdict: Verdict) -> Decision:
    updates = {"completion_time": format_time(o.now), "stage": None, "retry_at": None}
    event = _warning("Failed", verdict.message)
    return Decision(
        State(Kind.FAILED, verdict.reason, verdict.message), updates=updates, requeue=_AT_ONCE, events=(event,)
    )


def _next_attempt(status: JobStatus, o: Observed) -> dict[str, object]:
    attempt = status.attempt + 1
    return {"attempt": attempt, "child_name": _child_name(o, attempt), "stage": None}


def _child_name(o: Observed, attempt: int) -> str:
    return names.child_name(o.raw["metadata"]["name"], attempt)


def _attempt(o: Observed) -> tuple[dict[str, object], ...]:
    assert o.job is not None, "an attempt needs a valid job"
    assert o.profile is not None, "an attempt needs its profile"
    assert o.store is not None, "an attempt needs its store"
    return build_attempt(o.job, o.profile, o.store, o.status.attempt, o.run.progress if o.run else None)


def _all_children(o: Observed) -> tuple[ChildView, ...]:
    mine = (o.child,) if o.child is not None and o.child.ours else ()
    return (*mine, *o.other_children)


def _unfinished_others(o: Observed) -> list[ChildView]:
    return [child for child in o.other_children if not child.finished]


def _living(pods: tuple[PodView, ...]) -> list[PodView]:
    return [pod for pod in pods if not pod.ended]


def _once(status: JobStatus, event: Event) -> tuple[Event, ...]:
    """The event, unless a condition says the same already."""
    return () if any(event.message in condition.message for condition in status.conditions) else (event,)


def _normal(reason: str, message: str) -> Event:
    return Event(EventType.NORMAL, reason, message)


def _warning(reason: str, message: str) -> Event:
    return Event(EventType.WARNING, reason, message)
