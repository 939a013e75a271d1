"""What is seen and what is decided: the frozen types between observe, plan and apply. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from lora_api.job import JobStatus, LoRATrainingJob
from lora_api.problems import Problem
from lora_api.profile import LoRATrainingProfile, StoreSpec
from lora_api.run import CheckpointManifest, Control, ExitWord, FinalManifest, Progress, RunFile
from lora_api.store import StoredObject

Manifest = dict[str, Any]  # a Kubernetes object as plain data


@dataclass(frozen=True)
class JobKey:
    """Identity of a job in the work queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PodView:
    """What matters of one pod of the current attempt."""

    name: str
    index: int
    phase: str  # Pending | Running | Succeeded | Failed | Unknown
    terminating: bool = False
    grace_over: bool = False  # terminating for longer than its grace period
    disrupted: str | None = None  # message of the condition DisruptionTarget
    unschedulable: str | None = None  # message of the scheduler
    waiting: str | None = None  # "ImagePullBackOff: ..." of the trainer container
    exit_code: int | None = None
    oom_killed: bool = False
    word: ExitWord | None = None  # the trainer's own, from the termination log
    started_at: datetime | None = None  # when its trainer container began to run
    node: str | None = None
    reason: str = ""  # pod-level reason: Evicted, NodeLost, Terminated, ...
    message: str = ""  # pod-level message, such as which limit an evicted pod went over

    @property
    def ended(self) -> bool:
        """Whether its containers run no more."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class ChildView:
    """What matters of the attempt's batch/v1 Job."""

    name: str
    uid: str
    ours: bool  # owned by this very job (uid), not just of that name
    attempt: int = 0  # from its label
    suspended: bool = False
    terminating: bool = False
    failing: str | None = None  # message of its condition FailureTarget: it has failed, its pods are still ending
    failed: str | None = None  # message of its condition Failed
    complete: bool = False
    created_at: datetime | None = None
    started_at: datetime | None = None  # when it was last allowed to have pods: waiting in a queue doesn't count
    of_a_job: bool = False  # owned by some LoRATrainingJob: if not by this one, by one of this name that was deleted

    @property
    def finished(self) -> bool:
        """Whether it will start no more pods."""
        return self.complete or self.failed is not None


@dataclass(frozen=True)
class RunView:
    """What the run directory holds."""

    location: str
    owner: RunFile | None = None
    progress: Progress | None = None
    manifests: tuple[CheckpointManifest, ...] = ()  # committed, any order
    objects: tuple[StoredObject, ...] = ()  # everything below checkpoints/
    final: FinalManifest | None = None
    control: Control | None = None


@dataclass(frozen=True)
class Observed:
    """Everything that one decision is made from."""

    now: datetime
    raw: Manifest  # the object as read
    status: JobStatus  # parsed from it; defaults when there is none
    job: LoRATrainingJob | None = None  # None: the spec does not fit its type
    problems: tuple[Problem, ...] = ()  # of spec, profile, secret, bucket
    profile: LoRATrainingProfile | None = None
    store: StoreSpec | None = None
    child: ChildView | None = None
    pods: tuple[PodView, ...] = ()  # of the current attempt
    stray_pods: tuple[PodView, ...] = ()  # pods of other attempts that have not ended
    other_children: tuple[ChildView, ...] = ()  # our Jobs of other attempts
    run: RunView | None = None  # None: the store can't be read now
    store_error: str | None = None  # why it can't be read now; with a run: why it can't be written
    apply_error: str | None = None  # why the API server refused what the last pass tried
    warnings: tuple[str, ...] = ()  # texts of warning events of pods that don't start


class EventType(StrEnum):
    """Types of core/v1 events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Event:
    """One sentence in the job's event stream."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do: finalizers alone, else store, children, status; events when the status is written."""

    status: JobStatus
    create: tuple[Manifest, ...] = ()
    delete_children: tuple[tuple[str, str], ...] = ()  # (name, uid) of child Jobs; Service and ConfigMap go with them
    put_control: Control | None = None
    delete_keys: tuple[tuple[str, ...], ...] = ()  # batches of run-directory keys, one after the other
    delete_run: bool = False  # the whole run directory (deletionPolicy: Delete)
    finalizers: tuple[str, ...] | None = None  # None: leave as they are
    events: tuple[Event, ...] = field(default=())
    requeue_after_seconds: float | None = None  # None: wait for an event
