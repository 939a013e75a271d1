"""The decision: one pure function of one frozen `Observed`.

`RULES` read from the top like a specification; the first rule that applies decides the state and the actions.
What every pass does besides (progress, ledger, retention, conditions) is in `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from lora_api.job import FINALIZER, ConditionType, JobStatus
from lora_api.run import FinalManifest, Progress
from lora_operator.core.assemble import Decision, assemble
from lora_operator.core.classify import Cause, Evidence, Verdict, classify_end, has_ended
from lora_operator.core.conditions import condition_of, holds, is_terminal, shorten
from lora_operator.core.endings import (
    AT_ONCE,
    SOON,
    after,
    backoff_seconds,
    child_name,
    fail,
    go_on_failing,
    next_attempt,
    normal,
    warning,
)
from lora_operator.core.facts import (
    all_children,
    count_pods,
    has_run,
    heartbeat,
    is_foreign,
    living,
    own_result,
    pods_in_the_way,
    store_trouble,
    unstopped,
)
from lora_operator.core.manifests import build_attempt
from lora_operator.core.memory import times_shrunk
from lora_operator.core.progress import PROGRESS_INTERVAL, finished_progress
from lora_operator.core.state import Kind, State, waiting_state
from lora_operator.core.times import format_duration, format_time, parse_time
from lora_operator.core.validate import problems_of_run
from lora_operator.core.views import Event, Manifest, Observed, Plan, PodView

__all__ = ["RULES", "backoff_seconds", "plan"]

_RUNNING = PROGRESS_INTERVAL.total_seconds()
_LATER = 30.0
_RARELY = 120.0
_LEAVING = timedelta(seconds=60)  # a process that has committed its result may take this long to leave
_SAME = 150  # characters that must agree for two sentences to say the same
_QUOTA_RECLAIMED = "QuotaReclaimed"
_IN_ORDER = "The manifest, its profile and its store are in order"


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
    finalizers = tuple(metadata.get("finalizers") or ())
    state = State(Kind.DELETING, "Deleting", "The job is being deleted")
    if FINALIZER not in finalizers:
        return Decision(state)  # owner references do the rest
    children = tuple((child.name, child.uid) for child in all_children(o) if not child.terminating)
    pods = pods_in_the_way(o)
    if children or pods:
        return Decision(state, delete_children=children, requeue=SOON if pods else AT_ONCE)
    if o.run is None and o.store_error:
        text = f"The run directory can't be deleted yet: {o.store_error}"
        waits = State(Kind.DELETING, "Deleting", text)
        return Decision(waits, requeue=_LATER, events=_once(o.status, warning("DeleteWaits", text)))
    left = tuple(name for name in finalizers if name != FINALIZER)
    if o.run is None:  # waiting would hold up the whole namespace for what may never come back
        text = f"The run directory is left where it is: {store_trouble(o)}"
        return Decision(state, finalizers=left, events=(warning("RunDirectoryLeft", text),))
    ours = o.run.owner is not None and o.run.owner.uid == metadata.get("uid")
    return Decision(state, delete_run=ours, finalizers=left)


def _it_has_ended_for_good(o: Observed) -> Decision | None:
    if not is_terminal(o.status):
        return None
    kind = Kind.SUCCEEDED if holds(o.status, ConditionType.SUCCEEDED) else Kind.FAILED
    stop = unstopped(all_children(o)) if kind is Kind.FAILED else ()
    return Decision(State(kind, kind.value), delete_children=stop, frozen=True)


def _the_result_is_there(o: Observed) -> Decision | None:
    final = own_result(o)
    if o.job is None or o.run is None or final is None or problems_of_run(o.job, o.run):
        return None
    still_there = living(o.pods) if o.child is not None and not o.child.finished else []
    if still_there and _may_take_its_leave(o.now, final):
        text = f"The result is committed; {count_pods(len(still_there))} still running"
        state = State(Kind.RUNNING, "Finalizing", text)
        return Decision(state, updates={"stage": "Finalizing"}, requeue=SOON)
    text = f"Trained {final.step} steps; the adapter is {o.run.location}final/{final.adapter}"
    updates = {
        "progress": finished_progress(o.status.progress, heartbeat(o), final),
        "completion_time": format_time(o.now),
        "start_time": o.status.start_time or format_time(o.now),
        "stage": None,
        "retry_at": None,
    }
    stop = unstopped(all_children(o)) if still_there else ()
    state = State(Kind.SUCCEEDED, "Completed", text)
    return Decision(state, updates=updates, delete_children=stop, events=(normal("Succeeded", text),))


def _it_is_failing(o: Observed) -> Decision | None:
    return go_on_failing(o) if o.status.completion_time else None


def _it_can_not_be_accepted(o: Observed) -> Decision | None:
    if o.child is not None and o.child.ours and o.job is not None:
        return None  # it runs; what it was started from is a copy
    problems = [*o.problems, *(problems_of_run(o.job, o.run) if o.job and o.run else ())]
    if not problems:
        return None
    text = "; ".join(map(str, problems))
    reason = "InvalidSpec" if o.job is None else "NotAccepted"
    events = _once(o.status, warning(reason, text))
    return Decision(State(Kind.INVALID, reason, text), requeue=_LATER if o.job else None, events=events)


def _the_name_is_taken(o: Observed) -> Decision | None:
    if o.child is None or o.child.ours:
        return None
    if o.child.terminating or o.child.of_a_job:
        text = f"waiting for the Job {o.child.name} of an earlier job of this name to go"
        return Decision(waiting_state(o.status, Kind.PENDING, "NameInUse", text), requeue=SOON)
    text = f"A Job named {o.child.name} exists and belongs to somebody else; delete or rename it, or rename this job"
    events = _once(o.status, warning("NameTaken", text))
    return Decision(State(Kind.INVALID, "NameTaken", text), requeue=_LATER, events=events)


def _it_is_suspended(o: Observed) -> Decision | None:
    if o.job is None or not o.job.spec.run_policy.suspend:
        return None
    live = pods_in_the_way(o)
    stopping = Kind.RUNNING if any(pod.phase == "Running" for pod in live) else Kind.SUSPENDING
    if o.child is not None and not o.child.finished:
        state = State(stopping, "Suspending", "Saving and stopping, as spec.runPolicy.suspend asks")
        return Decision(state, updates=next_attempt(o), requeue=AT_ONCE)
    if live or unstopped(o.other_children):
        text = f"Waiting for {count_pods(len(live)) if live else 'the Job'} to save and stop"
        return Decision(State(stopping, "Suspending", text), requeue=SOON if live else AT_ONCE)
    text = "Suspended by spec.runPolicy.suspend; set it to false to go on"
    news = () if holds(o.status, ConditionType.SUSPENDED) else (normal("Suspended", text),)
    return Decision(State(Kind.SUSPENDED, "Suspended", text), updates={"stage": None}, events=news)


def _it_was_never_started(o: Observed) -> Decision | None:
    if o.status.attempt > 0:
        return None
    if o.run is None:
        text = f"The store can't be reached: {store_trouble(o)}"
        return Decision(State(Kind.PENDING, "StoreUnavailable", text, accepted=None), requeue=SOON)
    attempt = max((child.attempt for child in o.other_children), default=0) or 1  # more only if the status was lost
    first = {"attempt": attempt, "child_name": child_name(o, attempt), "start_time": format_time(o.now)}
    accepted = normal("Accepted", _IN_ORDER)
    created = normal("Created", f"Created attempt {attempt} as Job {first['child_name']}")
    if o.child is not None or o.other_children or pods_in_the_way(o) or o.apply_error:
        adopted = o.child is not None and o.child.ours  # made by a pass that did not come to say so
        events = (accepted, created) if adopted else (accepted,)
        return Decision(State(Kind.PENDING, "Accepted", _IN_ORDER), updates=first, requeue=AT_ONCE, events=events)
    # No intention is needed for the very first attempt: a crash before the status is written finds it already there.
    state = State(Kind.PENDING, "Starting", "attempt 1 is starting")
    return Decision(state, updates=first, create=_attempt(o, 1), requeue=SOON, events=(accepted, created))


def _its_attempt_has_ended(o: Observed) -> Decision | None:
    vanished = o.child is None and has_run(o.status) and not living(o.pods)
    if not vanished and (o.child is None or not has_ended(o.child, o.pods)):
        return None
    if o.run is None:  # whether it has finished is written in the store
        text = f"The attempt has ended; the store that knows its result can't be reached: {store_trouble(o)}"
        return Decision(waiting_state(o.status, Kind.PENDING, "StoreUnavailable", text), requeue=SOON)
    if o.child is not None and o.child.suspended and _was_counted_as_reclaimed(o.status):
        return Decision(waiting_state(o.status, Kind.QUEUED, "", ""), updates=next_attempt(o), requeue=AT_ONCE)
    beat = heartbeat(o)
    return after(o, classify_end(Evidence(o.child, o.pods, beat.exit if beat else None)))


def _it_has_stalled(o: Observed) -> Decision | None:
    limit = o.job.spec.run_policy.stall_timeout_seconds if o.job else 0
    running = _active(o)
    if not limit or not running or o.run is None or o.child is None or o.child.terminating:
        return None
    if _not_begun(o) or any(pod.terminating for pod in running):
        return None
    beat = heartbeat(o)
    alive = beat if beat and beat.exit is None else None
    told = (alive.advanced_at or alive.updated_at) if alive else None
    signs = [parse_time(told), _store_came_back_at(o), *(p.started_at for p in running)]
    last_sign = max((moment for moment in signs if moment is not None), default=None)
    if last_sign is None or o.now - last_sign <= timedelta(seconds=limit):
        return None
    step = f" at step {alive.step}" if alive else ""
    silence = format_duration((o.now - last_sign).total_seconds())
    hangs = alive is not None and _beats(alive, o.now, limit)
    what = "The trainer is alive, but makes no progress" if hangs else "No heartbeat"
    text = f"{what}{step} for {silence}; the limit is stallTimeoutSeconds: {limit}"
    lost = [pod for pod in running if pod.phase == "Unknown"]
    if lost:
        text = f"Pod {lost[0].name} on node {lost[0].node} can't be reached. {text}"
        return after(o, Verdict(Cause.INFRASTRUCTURE, "NodeLost", text))
    return after(o, Verdict(Cause.FAILURE, "NoProgress", text))


def _beats(beat: Progress, now: datetime, limit: int) -> bool:
    """Whether its process still reports."""
    told = parse_time(beat.updated_at)
    return told is not None and now - told <= timedelta(seconds=limit)


def _it_waits_to_be_created(o: Observed) -> Decision | None:
    if o.child is not None or has_run(o.status):
        return None
    retry_at = parse_time(o.status.retry_at)
    if retry_at is not None and o.now < retry_at:
        state = waiting_state(o.status, Kind.PENDING, "BackingOff", f"the next attempt begins at {o.status.retry_at}")
        return Decision(state, requeue=(retry_at - o.now).total_seconds())
    pods = pods_in_the_way(o)
    if pods or unstopped(o.other_children):
        text = f"waiting for {count_pods(len(pods)) if pods else 'the Job'} of an earlier attempt to end"
        state = waiting_state(o.status, Kind.PENDING, "Stopping", text)
        return Decision(state, requeue=SOON if pods else AT_ONCE)
    if o.run is None:  # the trainer could not reach it either; that would count as its failure
        text = f"the store can't be reached: {store_trouble(o)}"
        return Decision(waiting_state(o.status, Kind.PENDING, "StoreUnavailable", text), requeue=SOON)
    if o.apply_error:
        events = _once(o.status, warning("CreateRefused", o.apply_error))
        state = waiting_state(o.status, Kind.PENDING, "CreateRefused", o.apply_error)
        return Decision(state, requeue=_LATER, events=events)
    created = normal("Created", f"Created attempt {o.status.attempt} as Job {o.status.child_name}")
    state = _why_pods_wait(o)  # as the next look will find it: one write less
    return Decision(state, updates={"retry_at": None}, create=_attempt(o), requeue=SOON, events=(created,))


def _kueue_holds_it(o: Observed) -> Decision | None:
    if o.child is None or not o.child.suspended:
        return None
    text = "waiting for its queue to admit it"
    if not has_run(o.status):
        return Decision(waiting_state(o.status, Kind.QUEUED, "AwaitingAdmission", text), requeue=_RARELY)
    restarts = o.status.restarts.model_copy(update={"preemption": o.status.restarts.preemption + 1})
    state = State(Kind.INTERRUPTED, _QUOTA_RECLAIMED, f"The queue took its quota back — {text}")
    events = (warning("Interrupted", f"Attempt {o.status.attempt} was stopped: the queue took its quota back"),)
    return Decision(state, updates={"restarts": restarts, "stage": None}, requeue=_RARELY, events=events)


def _it_runs(o: Observed) -> Decision | None:
    running = _active(o)
    if not running or _not_begun(o):
        return None
    beat = heartbeat(o)
    if o.run is None:
        stage, detail = o.status.stage or "Initializing", f"; the store can't be reached: {store_trouble(o)}"
    elif beat is None or beat.exit is not None:
        stage, detail = "Initializing", ""
    else:
        stage, detail = beat.stage, f": {beat.detail}" if beat.detail else ""
    where = ", ".join(sorted({pod.node for pod in running if pod.node})) or "this machine"
    verb = "runs" if len(running) == 1 else "run"
    state = State(Kind.RUNNING, stage, f"{count_pods(len(running))} {verb} on {where}{detail}")
    stopping = [pod for pod in running if pod.terminating]
    if stopping:
        text = f"Pod {stopping[0].name} is being stopped ({stopping[0].disrupted or 'it was deleted'}); saving"
        state = State(Kind.RUNNING, "Stopping", text)
    began = () if has_run(o.status) else (normal("Started", f"Attempt {o.status.attempt} runs on {where}"),)
    requeue = SOON if stopping or stage != "Training" else _RUNNING
    return Decision(state, updates={"stage": stage}, requeue=requeue, events=began)


def _it_waits_for_its_pods(o: Observed) -> Decision:
    assert o.job is not None, "a job without a valid spec was not accepted"
    if has_run(o.status) and not _not_begun(o):
        text = "The pods have ended; how is not known yet"
        return Decision(State(Kind.RUNNING, "Ending", text), requeue=SOON)
    state = _why_pods_wait(o)
    limit = o.job.spec.run_policy.startup_deadline_seconds
    began = o.child.started_at if o.child else None
    if limit and began and o.now - began > timedelta(seconds=limit):
        text = f"The pods have not started within startupDeadlineSeconds: {limit}; {state.message}"
        return fail(o, Verdict(Cause.PERMANENT, "StartupDeadlineExceeded", text))
    return Decision(state, requeue=SOON)


def _why_pods_wait(o: Observed) -> State:
    for pod in o.pods:
        if pod.unschedulable is not None:
            return waiting_state(o.status, Kind.QUEUED, "Unschedulable", f"Pod {pod.name}: {pod.unschedulable}")
        if pod.waiting is not None:
            reason = pod.waiting.partition(":")[0]
            return waiting_state(o.status, Kind.PENDING, reason, f"Pod {pod.name}: {pod.waiting}")
    if o.warnings:
        return waiting_state(o.status, Kind.PENDING, "PodWarning", o.warnings[0])
    return waiting_state(o.status, Kind.PENDING, "Starting", f"attempt {o.status.attempt} is starting")


RULES: tuple[Callable[[Observed], Decision | None], ...] = (
    _it_is_being_deleted,
    _it_has_ended_for_good,
    _the_result_is_there,
    _it_is_failing,
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


def _may_take_its_leave(now: datetime, final: FinalManifest) -> bool:
    completed_at = parse_time(final.completed_at)
    return completed_at is not None and now - completed_at < _LEAVING


def _was_counted_as_reclaimed(status: JobStatus) -> bool:
    condition = condition_of(status, ConditionType.INTERRUPTED)
    return condition is not None and condition.status == "True" and condition.reason == _QUOTA_RECLAIMED


def _store_came_back_at(o: Observed) -> datetime | None:
    """When the store was readable again: a heartbeat could not be written before, and may take a moment more."""
    condition = condition_of(o.status, ConditionType.CHECKPOINT_GC)
    if condition is None:
        return None
    return parse_time(condition.last_transition_time) if condition.status == "True" else o.now


def _not_begun(o: Observed) -> list[PodView]:
    return [pod for pod in o.pods if pod.phase == "Pending" and not pod.terminating]


def _active(o: Observed) -> list[PodView]:
    return [pod for pod in o.pods if pod.phase in ("Running", "Unknown") and pod.exit_code is None]


def _attempt(o: Observed, number: int | None = None) -> tuple[Manifest, ...]:
    assert o.job is not None, "an attempt needs a valid job"
    assert o.profile is not None, "an attempt needs its profile"
    assert o.store is not None, "an attempt needs its store"
    last = o.run.progress if o.run and not is_foreign(o) else None
    attempt = number or o.status.attempt
    return build_attempt(o.job, o.profile, o.store, attempt, last=last, shrunk=times_shrunk(o))


def _once(status: JobStatus, event: Event) -> tuple[Event, ...]:
    """The event, unless a condition says the same already."""
    text = shorten(event.message, _SAME + 1)[:_SAME]
    return () if any(text in condition.message for condition in status.conditions) else (event,)
