"""The heartbeat and the ledger as status fields: strings and whole numbers, as API types should be."""

from __future__ import annotations

from datetime import datetime, timedelta

from lora_api import layout
from lora_api.job import CheckpointsStatus, JobStatus, LedgerEntry, OutputStatus, ProgressStatus
from lora_api.run import FinalManifest, Progress
from lora_operator.core.retention import Retention
from lora_operator.core.times import format_duration, parse_time
from lora_operator.core.views import RunView

PROGRESS_INTERVAL = timedelta(seconds=10)  # progress alone is written at most this often
_LEDGER_ENTRIES = 20
_SAMPLES = 8


def progress_status(progress: Progress) -> ProgressStatus:
    """A heartbeat."""
    return ProgressStatus(
        step=progress.step,
        steps=progress.steps,
        percent=percent(progress.step, progress.steps),
        loss=_number(progress.loss, ".4f"),
        learning_rate=_number(progress.learning_rate, ".3g"),
        steps_per_second=_number(progress.steps_per_second, ".3g"),
        samples_per_second=_number(progress.samples_per_second, ".3g"),
        eta_seconds=None if progress.eta_seconds is None else round(progress.eta_seconds),
        eta=None if progress.eta_seconds is None else format_duration(progress.eta_seconds),
        resumed_from_step=progress.resumed_from_step,
        updated_at=progress.updated_at,
    )


def percent(step: int, steps: int) -> str:
    """`42%`; 100 only when all is done."""
    return f"{min(100, 100 * step // steps) if steps else 0}%"


def finished_progress(before: ProgressStatus | None, final: FinalManifest) -> ProgressStatus:
    """The progress of a job whose final manifest exists."""
    base = before or ProgressStatus()
    return base.model_copy(
        update={"step": final.step, "steps": final.step, "percent": "100%", "eta_seconds": 0, "eta": "0s"}
    )


def checkpoints_status(run: RunView, retention: Retention, removed_before: int) -> CheckpointsStatus:
    """The ledger after retention."""
    entries = tuple(
        LedgerEntry(step=m.step, start=m.start, size_bytes=m.size_bytes, committed_at=m.committed_at)
        for m in retention.kept[:_LEDGER_ENTRIES]
    )
    return CheckpointsStatus(
        location=run.location + layout.CHECKPOINTS,
        count=len(retention.kept),
        newest_step=entries[0].step if entries else None,
        removed=removed_before + len(retention.expired),
        entries=entries,
    )


def output_status(run: RunView) -> OutputStatus:
    """Where things are."""
    if run.final is None:
        return OutputStatus(location=run.location)
    folder = run.location + layout.FINAL
    return OutputStatus(
        location=run.location,
        adapter=folder + run.final.adapter,
        samples=tuple(folder + name for name in run.final.samples[:_SAMPLES]),
        size_bytes=run.final.size_bytes,
    )


def hold_back_progress(old: JobStatus, new: JobStatus, now: datetime) -> JobStatus:
    """Keeps the old progress when it is all that changed and it is younger than the interval."""
    if old.progress is None or new.progress is None or old == new:
        return new
    written_at = parse_time(old.progress.updated_at)
    if written_at is None or now - written_at >= PROGRESS_INTERVAL:
        return new
    candidate = new.model_copy(update={"progress": old.progress})
    return candidate if candidate == old else new


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
