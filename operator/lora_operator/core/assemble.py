"""From a decision to a plan: what every pass does besides its rule. Progress, ledger, retention, conditions, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_api.job import FINALIZER, ConditionType, JobStatus
from lora_api.run import Control, Progress
from lora_operator.core.conditions import Fact, merge_conditions, phase_of, shorten
from lora_operator.core.progress import checkpoints_status, hold_back_progress, output_status, progress_status
from lora_operator.core.retention import Retention, plan_retention
from lora_operator.core.state import Kind, State, facts_of
from lora_operator.core.times import format_bytes
from lora_operator.core.views import Event, EventType, Manifest, Observed, Plan

_STATUS_LIMIT_BYTES = 8000


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
    frozen: bool = False  # the status stays as it is, byte for byte


def assemble(o: Observed, decision: Decision) -> Plan:
    """The whole plan of a pass."""
    if decision.frozen:
        return Plan(status=o.status, delete_children=decision.delete_children)
    retention = _retention(o)
    status = _status(o, decision, retention)
    events = (*decision.events, *_checkpoint_events(o, status, retention), *_resume_events(o, status))
    return Plan(
        status=_bounded(hold_back_progress(o.status, status, o.now)),
        create=decision.create,
        delete_children=decision.delete_children or _obsolete_children(o),
        put_control=_control(o),
        delete_keys=retention.delete_keys if retention else (),
        delete_run=decision.delete_run,
        finalizers=decision.finalizers if decision.finalizers is not None else _wanted_finalizers(o, decision),
        events=events,
        requeue_after_seconds=decision.requeue,
    )


def _status(o: Observed, decision: Decision, retention: Retention | None) -> JobStatus:
    updates: dict[str, Any] = {"observed_generation": o.raw["metadata"].get("generation", 0)}
    if o.run is not None and not _is_foreign(o):
        updates["output"] = output_status(o.run)
        if o.run.progress is not None:
            updates["lost_steps"] = max(o.status.lost_steps, o.run.progress.lost_steps)
            updates["progress"] = _latest_progress(o.status, o.run.progress)
        if retention is not None:
            updates["checkpoints"] = checkpoints_status(o.run, retention, o.status.checkpoints.removed)
    status = o.status.model_copy(update={**updates, **decision.updates})
    facts = [*facts_of(decision.state), *_checkpoint_facts(o, status)]
    conditions = merge_conditions(o.status.conditions, facts, status.observed_generation, o.now)
    status = status.model_copy(update={"conditions": conditions, "restarts_total": status.restarts.total})
    phase = phase_of(status, invalid=decision.state.kind is Kind.INVALID, deleting=decision.state.kind is Kind.DELETING)
    return status.model_copy(update={"phase": phase})


def _latest_progress(status: JobStatus, beat: Progress) -> Any:
    """A start that has not resumed yet says step 0; people keep seeing where the job was."""
    fresh = progress_status(beat)
    preparing = beat.stage in ("Initializing", "PreparingData")
    if preparing and status.progress is not None and beat.step < status.progress.step:
        return status.progress
    return fresh


def _retention(o: Observed) -> Retention | None:
    if o.run is None or o.job is None or not o.run.manifests or _is_foreign(o):
        return None
    return plan_retention(o.run, o.job.spec.config.save.max_step_saves, o.now)


def _is_foreign(o: Observed) -> bool:
    """Whether the run directory belongs to another job that this one was not told to continue."""
    if o.run is None or o.run.owner is None or o.run.owner.uid == o.raw["metadata"].get("uid"):
        return False
    return o.job is None or o.job.spec.output.if_exists == "Refuse"


def _control(o: Observed) -> Control | None:
    """The runtime parameters, when the run directory's are not what the spec says now."""
    if o.job is None or o.run is None or o.run.owner is None or o.run.final is not None or _is_foreign(o):
        return None
    config = o.job.spec.config
    wanted = Control(
        generation=o.job.metadata.generation,
        steps=config.train.steps,
        lr=config.train.lr,
        save_every=config.save.save_every,
        max_step_saves=config.save.max_step_saves,
        sample=config.sample.model_dump(mode="json"),
    )
    there = o.run.control
    if there is not None and there.model_copy(update={"generation": wanted.generation}) == wanted:
        return None
    return wanted


def _obsolete_children(o: Observed) -> tuple[tuple[str, str], ...]:
    """Jobs of earlier attempts: stopped if they still run; the last one is kept for its logs while the next runs."""
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
    if not status.checkpoints.count:
        return []
    if o.store_error:
        return [Fact(ConditionType.CHECKPOINT_GC, False, "StoreUnavailable", o.store_error)]
    text = f"{status.checkpoints.count} kept, {status.checkpoints.removed} removed"
    rejected = o.run.progress.rejected if o.run and o.run.progress else ()
    for item in rejected:
        text += f"; the checkpoint of step {item.step} failed its check: {item.reason}"
    return [Fact(ConditionType.CHECKPOINT_GC, True, "CheckpointRejected" if rejected else "UpToDate", text)]


def _checkpoint_events(o: Observed, status: JobStatus, retention: Retention | None) -> list[Event]:
    if retention is None:
        return []
    known = {(entry.step, entry.start) for entry in o.status.checkpoints.entries}
    newest = o.status.checkpoints.newest_step or -1
    events = [
        Event(
            EventType.NORMAL,
            "CheckpointSaved",
            f"The checkpoint of step {m.step} is committed ({format_bytes(m.size_bytes)})",
        )
        for m in reversed(retention.kept)
        if (m.step, m.start) not in known and m.step >= newest
    ]
    if retention.expired:
        steps = ", ".join(str(m.step) for m in reversed(retention.expired))
        word = "checkpoint" if len(retention.expired) == 1 else "checkpoints"
        text = f"Removed {len(retention.expired)} old {word} (step {steps}); {status.checkpoints.count} are kept"
        events.append(Event(EventType.NORMAL, "CheckpointsRemoved", text))
    return events


def _resume_events(o: Observed, status: JobStatus) -> list[Event]:
    """Said once per start: when it is first seen past its preparation."""
    beat = o.run.progress if o.run else None
    if beat is None or beat.resumed_from_step is None or beat.attempt != o.status.attempt:
        return []
    was_training = o.status.stage in ("Training", "Finalizing")
    is_past = status.stage in ("Training", "Finalizing") or (o.run is not None and o.run.final is not None)
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
        f"; {lost} steps are done again" if lost > 0 else ""
    )
    return [*events, Event(EventType.NORMAL, "Resumed", text)]


def _bounded(status: JobStatus) -> JobStatus:
    """Under 8 kB: a status is read by every list call. The oldest ledger entries are left out first."""
    while (
        len(status.model_dump_json(by_alias=True, exclude_none=True)) > _STATUS_LIMIT_BYTES
        and status.checkpoints.entries
    ):
        fewer = status.checkpoints.model_copy(update={"entries": status.checkpoints.entries[:-1]})
        status = status.model_copy(update={"checkpoints": fewer})
    return status
