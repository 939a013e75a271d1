"""From a decision to a plan: what every pass does besides its rule. Progress, ledger, retention, conditions, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_api.job import FINALIZER, ConditionType, JobStatus
from lora_api.run import CheckpointManifest, Control
from lora_operator.core.conditions import Fact, condition_of, is_terminal, merge_conditions, phase_of, shorten
from lora_operator.core.facts import heartbeat, is_foreign, own_result, uid_of
from lora_operator.core.progress import (
    checkpoints_status,
    hold_back_progress,
    is_preparing,
    latest_progress,
    output_status,
)
from lora_operator.core.retention import Retention, plan_retention, without_deletion
from lora_operator.core.state import Kind, State, facts_of
from lora_operator.core.times import format_bytes
from lora_operator.core.views import Event, EventType, Manifest, Observed, Plan

_STATUS_LIMIT_BYTES = 8000
_TIGHT_MESSAGE = 200  # characters, where a status would be too big otherwise
_NEWS_LIMIT = 3  # more checkpoints than these at once are told in one event


@dataclass(frozen=True)
class Decision:
    """What a rule decides: the state, status fields that change with it, actions, when to look again."""

    state: State
    updates: dict[str, Any] = field(default_factory=dict)
    create: tuple[Manifest, ...] = ()
    delete_children: tuple[tuple[str, str], ...] = ()
    delete_run: bool = False
    finalizers: tuple[str, ...] | None = None
    requeue: float | None = None
    events: tuple[Event, ...] = ()
    frozen: bool = False  # the status stays as it is, but for the generation seen


def assemble(o: Observed, decision: Decision) -> Plan:
    """The whole plan of a pass."""
    generation = o.raw["metadata"].get("generation", 0)
    if decision.frozen:
        status = o.status if o.status.observed_generation == generation else _observed(o.status, generation)
        return Plan(status=status, delete_children=decision.delete_children)
    deleting = decision.state.kind is Kind.DELETING
    retention = None if deleting else _retention(o)
    status = _status(o, decision, retention)
    news = (*_resume_events(o, status), *_checkpoint_events(o, status, retention))
    begins = decision.state.kind is Kind.RUNNING
    events = (*decision.events, *news) if begins else (*news, *decision.events)
    return Plan(
        status=hold_back_progress(o.status, _bounded(status), o.now),
        create=decision.create,
        delete_children=decision.delete_children or _obsolete_children(o),
        put_control=None if deleting else _control(o),
        delete_keys=retention.delete_keys if retention else (),
        delete_run=decision.delete_run,
        finalizers=decision.finalizers if decision.finalizers is not None else _wanted_finalizers(o, decision),
        events=events,
        requeue_after_seconds=decision.requeue,
    )


def _status(o: Observed, decision: Decision, retention: Retention | None) -> JobStatus:
    updates: dict[str, Any] = {"observed_generation": o.raw["metadata"].get("generation", 0)}
    deleting = decision.state.kind is Kind.DELETING
    if o.run is not None and not is_foreign(o) and not deleting:
        updates["output"] = output_status(o.run, own_result(o))
        if o.run.progress is not None:
            beat, runs = o.run.progress, decision.state.kind is Kind.RUNNING
            updates["progress"] = latest_progress(o.status.progress, beat, running=runs)
            if not is_preparing(beat):  # together with the event that tells of them
                updates["lost_steps"] = max(o.status.lost_steps, beat.lost_steps)
        if retention is not None:
            removed = o.status.checkpoints.removed + len(_removed_steps(o, retention))
            updates["checkpoints"] = checkpoints_status(o.run, retention, removed)
    status = o.status.model_copy(update={**updates, **decision.updates})
    facts = [*facts_of(decision.state), *_checkpoint_facts(o, status)]
    if deleting and is_terminal(o.status):  # how it ended stays true
        facts = [Fact(ConditionType.RECONCILING, True, decision.state.reason, decision.state.message)]
    conditions = merge_conditions(o.status.conditions, facts, status.observed_generation, o.now)
    status = status.model_copy(update={"conditions": conditions})
    phase = phase_of(status, invalid=decision.state.kind is Kind.INVALID, deleting=deleting)
    return status.model_copy(update={"phase": phase, "restarts_total": status.restarts.total})


def _observed(status: JobStatus, generation: int) -> JobStatus:
    """A finished job whose spec was edited: seen, and without effect."""
    conditions = tuple(c.model_copy(update={"observed_generation": generation}) for c in status.conditions)
    return status.model_copy(update={"observed_generation": generation, "conditions": conditions})


def _retention(o: Observed) -> Retention | None:
    if o.run is None or o.job is None or not o.run.manifests or is_foreign(o):
        return None
    retention = plan_retention(o.run, o.job.spec.config.save.max_step_saves, o.now)
    return without_deletion(retention) if o.store_error else retention  # it was tried just now, and not possible


def _control(o: Observed) -> Control | None:
    """The runtime parameters, when the run directory's are not what the spec says now."""
    if o.job is None or o.run is None or o.run.owner is None or own_result(o) is not None or is_foreign(o):
        return None
    config = o.job.spec.config
    wanted = Control(
        generation=o.job.metadata.generation,
        steps=config.train.steps,
        lr=config.train.lr,
        save_every=config.save.save_every,
        max_step_saves=config.save.max_step_saves,
        sample=config.sample.model_dump(mode="json"),
        save=config.save.model_dump(mode="json"),
    )
    there = o.run.control
    if there is not None and there.model_copy(update={"generation": wanted.generation}) == wanted:
        return None
    return wanted


def _obsolete_children(o: Observed) -> tuple[tuple[str, str], ...]:
    """Jobs of earlier attempts: stopped if they still run; the last one is kept for its logs while the next runs."""
    if o.status.attempt == 0:  # the status was lost: the newest of them may be taken up again
        return ()
    return tuple(
        (child.name, child.uid)
        for child in o.other_children
        if not child.terminating and not (child.finished and child.attempt == o.status.attempt - 1)
    )


def _wanted_finalizers(o: Observed, decision: Decision) -> tuple[str, ...] | None:
    """Ours when deleting the job must delete the run directory, and not otherwise; None when it is so already."""
    if o.job is None or decision.state.kind in (Kind.INVALID, Kind.DELETING):
        return None
    there = tuple(o.raw["metadata"].get("finalizers") or ())
    wanted = o.job.spec.output.deletion_policy == "Delete"
    if wanted == (FINALIZER in there):
        return None
    return (*there, FINALIZER) if wanted else tuple(name for name in there if name != FINALIZER)


def _checkpoint_facts(o: Observed, status: JobStatus) -> list[Fact]:
    """Whether retention is up to date. When the store comes back is read from its transition, see `plan`."""
    if o.store_error:
        return [Fact(ConditionType.CHECKPOINT_GC, False, "StoreUnavailable", o.store_error)]
    known = status.checkpoints.count or condition_of(o.status, ConditionType.CHECKPOINT_GC)
    if o.run is None or is_foreign(o) or not known:
        return []
    text = f"{status.checkpoints.count} kept, {status.checkpoints.removed} removed"
    rejected = o.run.progress.rejected if o.run.progress else ()
    for item in rejected:
        text += f"; the checkpoint of step {item.step} failed its check: {item.reason}"
    return [Fact(ConditionType.CHECKPOINT_GC, True, "CheckpointRejected" if rejected else "UpToDate", text)]


def _checkpoint_events(o: Observed, status: JobStatus, retention: Retention | None) -> list[Event]:
    if retention is None:
        return []
    events = [_saved_event(m) for m in _new_checkpoints(o, retention)[-_NEWS_LIMIT:]]
    gone = _removed_steps(o, retention)
    if gone:
        steps = ", ".join(map(str, gone[:_NEWS_LIMIT]))
        more = ", ..." if len(gone) > _NEWS_LIMIT else ""
        word = "checkpoint" if len(gone) == 1 else "checkpoints"
        text = f"Removed {len(gone)} old {word} (step {steps}{more}); {status.checkpoints.count} are kept"
        events.append(Event(EventType.NORMAL, "CheckpointsRemoved", text))
    return events


def _removed_steps(o: Observed, retention: Retention) -> list[int]:
    """Steps of the checkpoints that are removed now, oldest first.

    And of those that the ledger lists and the store has no more: a pass removed them and did not come to write that down.
    """
    there = {(m.step, m.start) for m in (*retention.kept, *retention.expired)}
    oldest = min((m.step for m in retention.kept), default=0)
    unsaid = [e for e in o.status.checkpoints.entries if (e.step, e.start) not in there and e.step < oldest]
    return sorted([*(m.step for m in retention.expired), *(entry.step for entry in unsaid)])


def _new_checkpoints(o: Observed, retention: Retention) -> list[CheckpointManifest]:
    """This job's own that were not in the ledger, oldest first."""
    known = {(entry.step, entry.start) for entry in o.status.checkpoints.entries}
    newest = o.status.checkpoints.newest_step or -1
    mine = [m for m in reversed(retention.kept) if m.uid == uid_of(o)]
    return [m for m in mine if (m.step, m.start) not in known and m.step >= newest]


def _saved_event(m: CheckpointManifest) -> Event:
    text = f"The checkpoint of step {m.step} is committed ({format_bytes(m.size_bytes)})"
    return Event(EventType.NORMAL, "CheckpointSaved", text)


def _resume_events(o: Observed, status: JobStatus) -> list[Event]:
    """Said once per start: when it is first seen past its preparation."""
    beat = heartbeat(o)
    if beat is None or beat.resumed_from_step is None:
        return []
    was_training = o.status.stage in ("Training", "Finalizing")
    is_past = status.stage in ("Training", "Finalizing") or own_result(o) is not None
    if was_training or not is_past:
        return []
    events = [
        Event(
            EventType.WARNING,
            "CheckpointRejected",
            shorten(f"The checkpoint of step {item.step} was not used: {item.reason}"),
        )
        for item in beat.rejected
    ]
    lost = status.lost_steps - o.status.lost_steps
    text = f"Resumed from the checkpoint of step {beat.resumed_from_step}" + (
        f"; {lost} {'step is' if lost == 1 else 'steps are'} done again" if lost > 0 else ""
    )
    return [*events, Event(EventType.NORMAL, "Resumed", text)]


def _bounded(status: JobStatus) -> JobStatus:
    """Under 8 kB: a status is read by every list call. What can be read elsewhere is left out first."""
    while _size_bytes(status) > _STATUS_LIMIT_BYTES and len(status.checkpoints.entries) > 1:  # one tells what is news
        fewer = status.checkpoints.model_copy(update={"entries": status.checkpoints.entries[:-1]})
        status = status.model_copy(update={"checkpoints": fewer})
    while _size_bytes(status) > _STATUS_LIMIT_BYTES and status.output.samples:
        fewer_samples = status.output.model_copy(update={"samples": status.output.samples[:-1]})
        status = status.model_copy(update={"output": fewer_samples})
    if _size_bytes(status) > _STATUS_LIMIT_BYTES:
        short = tuple(c.model_copy(update={"message": shorten(c.message, _TIGHT_MESSAGE)}) for c in status.conditions)
        status = status.model_copy(update={"conditions": short})
    return status


def _size_bytes(status: JobStatus) -> int:
    return len(status.model_dump_json(by_alias=True, exclude_none=True).encode())
