"""The heartbeat and the ledger as status fields: strings and whole numbers, as API types should be."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from lora_api import layout
from lora_api.job import (
    CheckpointsStatus,
    Condition,
    ConditionType,
    JobStatus,
    LedgerEntry,
    OutputStatus,
    ProgressStatus,
)
from lora_api.run import FinalManifest, Progress
from lora_operator.core.retention import Retention
from lora_operator.core.times import format_duration, parse_time
from lora_operator.core.views import RunView

PROGRESS_INTERVAL = timedelta(seconds=10)  # progress alone is written at most this often
_LEDGER_ENTRIES = 20
_SAMPLES = 8


def progress_status(progress: Progress) -> ProgressStatus:
    """A heartbeat."""
    eta = progress.eta_seconds if progress.eta_seconds is not None and math.isfinite(progress.eta_seconds) else None
    return ProgressStatus(
        step=progress.step,
        steps=progress.steps,
        percent=percent(progress.step, progress.steps),
        loss=_number(progress.loss, ".4f"),
        learning_rate=_number(progress.learning_rate, ".3g"),
        steps_per_second=_number(progress.steps_per_second, ".3g"),
        samples_per_second=_number(progress.samples_per_second, ".3g"),
        eta_seconds=None if eta is None else round(eta),
        eta=None if eta is None else format_duration(eta),
        resumed_from_step=progress.resumed_from_step,
        updated_at=progress.updated_at,
    )


def latest_progress(before: ProgressStatus | None, beat: Progress, *, running: bool) -> ProgressStatus:
    """What people see of a heartbeat.

    A start that has not resumed yet says step 0: they keep seeing where the job was. And nothing that stands still has a
    time of arrival.
    """
    shown = progress_status(beat)
    if is_preparing(beat) and before is not None and beat.step < before.step:
        shown = before
    return shown if running else shown.model_copy(update={"eta_seconds": None, "eta": None})


def is_preparing(beat: Progress) -> bool:
    """Whether its start has not begun to train."""
    return beat.stage in ("Initializing", "PreparingData")


def percent(step: int, steps: int) -> str:
    """`42%`; 100 only when all is done."""
    return f"{min(100, 100 * step // steps) if steps else 0}%"


def finished_progress(before: ProgressStatus | None, beat: Progress | None, final: FinalManifest) -> ProgressStatus:
    """The progress of a job whose final manifest exists."""
    base = progress_status(beat) if beat else before or ProgressStatus()
    return base.model_copy(
        update={"step": final.step, "steps": final.step, "percent": "100%", "eta_seconds": 0, "eta": "0s"}
    )


def checkpoints_status(run: RunView, retention: Retention, removed: int) -> CheckpointsStatus:
    """The ledger after retention, which has removed so many in all."""
    entries = tuple(
        LedgerEntry(step=m.step, start=m.start, size_bytes=m.size_bytes, committed_at=m.committed_at)
        for m in retention.kept[:_LEDGER_ENTRIES]
    )
    return CheckpointsStatus(
        location=run.location + layout.CHECKPOINTS,
        count=len(retention.kept),
        newest_step=entries[0].step if entries else None,
        removed=removed,
        entries=entries,
    )


def output_status(run: RunView, final: FinalManifest | None) -> OutputStatus:
    """Where things are; `final` is the job's own, an earlier job's does not count."""
    if final is None:
        return OutputStatus(location=run.location)
    folder = run.location + layout.FINAL
    return OutputStatus(
        location=run.location,
        adapter=folder + final.adapter,
        samples=tuple(folder + name for name in final.samples[:_SAMPLES]),
        size_bytes=final.size_bytes,
    )


def hold_back_progress(old: JobStatus, new: JobStatus, now: datetime) -> JobStatus:
    """Keeps the old status when only progress has changed and what is written is younger than the interval.

    Words count as progress where the facts stay the same: a running job's message tells which picture is encoded.
    """
    if old.progress is None or new.progress is None or old == new:
        return new
    written_at = parse_time(old.progress.updated_at)
    if written_at is None or not timedelta(0) <= now - written_at < PROGRESS_INTERVAL:
        return new
    same_facts = [_fact(condition) for condition in old.conditions] == [
        _fact(condition) for condition in new.conditions
    ]
    held = {"progress": old.progress} | ({"conditions": old.conditions} if same_facts and _runs(new) else {})
    candidate = new.model_copy(update=held)
    return candidate if candidate == old else new


def _fact(condition: Condition) -> tuple[object, ...]:
    return condition.type, condition.status, condition.reason, condition.observed_generation


def _runs(status: JobStatus) -> bool:
    return any(
        condition.type == ConditionType.RUNNING and condition.status == "True" for condition in status.conditions
    )


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
