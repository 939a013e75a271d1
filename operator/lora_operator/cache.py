"""Small views of all jobs, fed by watch events and lists: who is finished, which uid is which job, what to count.

The cache decides only whether a job is worth a look. What is done to a job is decided from the job as it is read then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lora_operator.core.views import JobKey, Manifest

_OVER = ("Succeeded", "Failed")
_CAUSES = {"preemption", "failure", "outOfMemory", "infrastructure"}


@dataclass(frozen=True, slots=True)
class JobView:
    """What is kept of one job."""

    uid: str
    version: int  # resourceVersion
    wish: tuple[Any, ...]  # what users and the garbage collector change: as long as it is the same, only we wrote
    profile: str
    phase: str
    finished: bool  # nothing to do until its spec changes or it is deleted
    outcome: str | None = None  # Succeeded | Failed
    step: int = 0
    steps: int = 0
    steps_per_second: float | None = None
    checkpoints: int = 0
    checkpoints_removed: int = 0
    lost_steps: int = 0
    restarts: dict[str, int] = field(default_factory=dict)


def view_of(job: Manifest) -> JobView:
    """The view of a LoRATrainingJob as read; a status that makes no sense counts as none."""
    metadata, spec = job["metadata"], _mapping(job.get("spec"))
    status = _mapping(job.get("status"))
    progress, checkpoints = _mapping(status.get("progress")), _mapping(status.get("checkpoints"))
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or [] if isinstance(c, dict)}
    outcome = next((kind for kind in _OVER if conditions.get(kind) == "True"), None)
    decided = status.get("observedGeneration") == metadata.get("generation")
    return JobView(
        uid=metadata["uid"],
        version=_whole(metadata.get("resourceVersion")),
        wish=(
            metadata.get("generation"),
            metadata.get("deletionTimestamp"),
            tuple(metadata.get("finalizers") or ()),
        ),
        profile=str(spec.get("profile") or "default"),
        phase=str(status.get("phase") or "Pending"),
        finished=outcome is not None and decided and not metadata.get("deletionTimestamp"),
        outcome=outcome,
        step=_whole(progress.get("step")),
        steps=_whole(progress.get("steps")),
        steps_per_second=_number(progress.get("stepsPerSecond")),
        checkpoints=_whole(checkpoints.get("count")),
        checkpoints_removed=_whole(checkpoints.get("removed")),
        lost_steps=_whole(status.get("lostSteps")),
        restarts={
            cause: _whole(count) for cause, count in _mapping(status.get("restarts")).items() if cause in _CAUSES
        },
    )


class JobCache:
    """The newest view of every job."""

    def __init__(self) -> None:
        self._views: dict[JobKey, JobView] = {}
        self._keys: dict[str, JobKey] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[tuple[JobKey, JobView]]:
        return iter(self._views.items())

    def get(self, key: JobKey) -> JobView | None:
        """The view; None of a job that was never seen."""
        return self._views.get(key)

    def put(self, key: JobKey, view: JobView) -> bool:
        """Takes a view, unless a newer one of the same object is there; lists and events overtake each other.

        Returns:
            Whether it was taken.
        """
        known = self._views.get(key)
        if known is not None and known.uid == view.uid and known.version > view.version:
            return False
        if known is not None and known.uid != view.uid:
            self._keys.pop(known.uid, None)
        self._views[key] = view
        self._keys[view.uid] = key
        return True

    def remove(self, key: JobKey, uid: str | None = None) -> None:
        """The job is gone; with a uid, only that very object is."""
        known = self._views.get(key)
        if known is None or (uid is not None and known.uid != uid):
            return
        del self._views[key]
        self._keys.pop(known.uid, None)

    def key_of(self, uid: str) -> JobKey | None:
        """Which job has this uid."""
        return self._keys.get(uid)

    def of_profile(self, name: str) -> list[JobKey]:
        """The jobs that name a profile."""
        return [key for key, view in self._views.items() if view.profile == name]

    def phases(self) -> Counter[str]:
        """How many jobs there are in each phase."""
        return Counter(view.phase for view in self._views.values())


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int:
    number = _number(value)
    return int(number) if number is not None else 0


def _number(value: Any) -> float | None:
    try:
        return float(value) if value is not None else None
    except (TypeError, ValueError):
        return None
