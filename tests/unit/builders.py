"""Fluent builders: each says in one line what a test is about and leaves the rest as it usually is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from lora_api import layout, names
from lora_api.job import JobStatus, LoRATrainingJob, status_to_wire
from lora_api.problems import parse
from lora_api.profile import LoRATrainingProfile
from lora_api.run import (
    CheckpointManifest,
    Control,
    ExitWord,
    FileEntry,
    FinalManifest,
    Progress,
    RejectedCheckpoint,
    RunFile,
)
from lora_api.store import StoredObject
from lora_operator.core.times import format_time
from lora_operator.core.views import ChildView, Manifest, Observed, PodView, RunView

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
UID = "0a0a0a0a-0000-4000-8000-000000000001"
LOCATION = "s3://runs/team-a/mascot/"


def ago(seconds: float) -> str:
    """RFC 3339, that many seconds before NOW."""
    return format_time(NOW - timedelta(seconds=seconds))


def word(code: int, message: str = "said the trainer", *, reason: str = "Said", step: int = 0) -> ExitWord:
    """A trainer's last word."""
    return ExitWord(code=code, reason=reason, message=message, step=step)


class JobBuilder:
    """A LoRATrainingJob as the API server returns it."""

    def __init__(self) -> None:
        self._job: Manifest = {
            "apiVersion": "lora-operator.io/v1alpha1",
            "kind": "LoRATrainingJob",
            "metadata": {
                "name": "mascot",
                "namespace": "team-a",
                "uid": UID,
                "generation": 1,
                "resourceVersion": "1",
            },
            "spec": {
                "config": {
                    "device": "cuda",
                    "model": {"arch": "flux2_klein_4b", "name_or_path": "s3://models/klein"},
                    "datasets": [{"folder_path": "s3://datasets/mascot"}],
                    "train": {"steps": 300},
                    "save": {"save_every": 100, "max_step_saves": 3},
                },
                "runPolicy": {"backoffLimit": 3, "stallTimeoutSeconds": 600},
            },
        }

    def named(self, name: str) -> Self:
        self._job["metadata"]["name"] = name
        return self

    def suspended(self, value: bool = True) -> Self:
        return self.with_policy(suspend=value)

    def with_policy(self, **fields: Any) -> Self:
        self._job["spec"]["runPolicy"].update(fields)
        return self

    def with_output(self, **fields: Any) -> Self:
        self._job["spec"].setdefault("output", {}).update(fields)
        return self

    def with_config(self, section: str, **fields: Any) -> Self:
        self._job["spec"]["config"].setdefault(section, {}).update(fields)
        return self

    def on(self, *, nodes: int) -> Self:
        self._job["spec"].setdefault("resources", {})["nodes"] = nodes
        return self

    def with_metadata(self, **fields: Any) -> Self:
        self._job["metadata"].update(fields)
        return self

    def with_status(self, status: JobStatus) -> Self:
        self._job["status"] = status_to_wire(status)
        return self

    def manifest(self) -> Manifest:
        """Plain data, nobody else's."""
        return copy.deepcopy(self._job)

    def build(self) -> LoRATrainingJob:
        """The parsed job."""
        return parse(LoRATrainingJob, {**self._job, "status": None})


class ProfileBuilder:
    """A LoRATrainingProfile with one S3 store."""

    def __init__(self) -> None:
        self._profile: Manifest = {
            "apiVersion": "lora-operator.io/v1alpha1",
            "kind": "LoRATrainingProfile",
            "metadata": {"name": "default"},
            "spec": {
                "stores": [
                    {
                        "name": "default",
                        "type": "s3",
                        "endpoint": "http://minio.storage.svc:9000",
                        "bucket": "runs",
                        "credentials": {"operatorSecretName": "operator-s3", "jobSecretName": "job-s3"},
                    }
                ],
                "trainer": {"image": "registry.example/lora-trainer:1"},
                "backoff": {"initialSeconds": 10, "maxSeconds": 360},
            },
        }

    def with_trainer(self, **fields: Any) -> Self:
        self._profile["spec"]["trainer"].update(fields)
        return self

    def with_sizing(self, **fields: Any) -> Self:
        self._profile["spec"].setdefault("sizing", {}).update(fields)
        return self

    def with_backoff(self, initial: int, maximum: int) -> Self:
        self._profile["spec"]["backoff"] = {"initialSeconds": initial, "maxSeconds": maximum}
        return self

    def manifest(self) -> Manifest:
        """Plain data, nobody else's."""
        return copy.deepcopy(self._profile)

    def build(self) -> LoRATrainingProfile:
        """The parsed profile."""
        return parse(LoRATrainingProfile, self._profile)


class PodBuilder:
    """A pod of the current attempt, as a view; running since a minute ago."""

    def __init__(self, index: int = 0) -> None:
        self._view = PodView(
            name=f"mascot-1-{index}-abcde",
            index=index,
            phase="Running",
            started_at=NOW - timedelta(minutes=1),
            node=f"node-{index}",
        )

    def _with(self, **changes: Any) -> Self:
        self._view = replace(self._view, **changes)
        return self

    def pending(self, **why: Any) -> Self:
        return self._with(phase="Pending", started_at=None, node=None, **why)

    def unschedulable(self, message: str) -> Self:
        return self.pending(unschedulable=message)

    def ended(self, code: int, said: ExitWord | None = None) -> Self:
        return self._with(phase="Failed" if code else "Succeeded", exit_code=code, word=said, started_at=None)

    def disrupted(self, message: str = "preempting to accommodate a higher priority pod") -> Self:
        return self._with(disrupted=message)

    def deleted(self, *, grace_over: bool = False) -> Self:
        return self._with(terminating=True, grace_over=grace_over)

    def oom_killed(self) -> Self:
        return self.ended(137)._with(oom_killed=True)

    def evicted(self, message: str) -> Self:
        return self._with(phase="Failed", reason="Evicted", message=message, started_at=None)

    def build(self) -> PodView:
        return self._view


class ChildBuilder:
    """The Job of an attempt, as a view."""

    def __init__(self, attempt: int = 1) -> None:
        self._view = ChildView(
            name=names.child_name("mascot", attempt),
            uid=f"child-{attempt}",
            ours=True,
            attempt=attempt,
            created_at=NOW - timedelta(minutes=2),
            of_a_job=True,
        )

    def _with(self, **changes: Any) -> Self:
        self._view = replace(self._view, **changes)
        return self

    def failed(self, message: str = "Job has reached the specified backoff limit") -> Self:
        return self._with(failed=message)

    def failing(self, message: str) -> Self:
        return self._with(failing=message)

    def complete(self) -> Self:
        return self._with(complete=True)

    def suspended(self) -> Self:
        return self._with(suspended=True)

    def terminating(self) -> Self:
        return self._with(terminating=True)

    def foreign(self, *, of_a_job: bool = False) -> Self:
        return self._with(ours=False, of_a_job=of_a_job)

    def created(self, seconds_ago: float, *, started_seconds_ago: float | None = None) -> Self:
        started = None if started_seconds_ago is None else NOW - timedelta(seconds=started_seconds_ago)
        return self._with(created_at=NOW - timedelta(seconds=seconds_ago), started_at=started)

    def build(self) -> ChildView:
        return self._view


def checkpoint(step: int, start: int = 1, *, uid: str = UID, size_bytes: int = 1000) -> CheckpointManifest:
    """A committed checkpoint of one file."""
    return CheckpointManifest(
        step=step,
        start=start,
        attempt=start,
        uid=uid,
        config_hash="c0ffee",
        committed_at=ago(60),
        files=(FileEntry(name="adapter.safetensors", size_bytes=size_bytes, sha256="00"),),
    )


def beat(step: int, **changes: Any) -> Progress:
    """A heartbeat of attempt 1, a second old."""
    fields: dict[str, Any] = {
        "start": 1,
        "attempt": 1,
        "stage": "Training",
        "step": step,
        "steps": 300,
        "loss": 0.5,
        "eta_seconds": 100.0,
        "updated_at": ago(1),
    }
    return Progress(**{**fields, **changes})


def final(step: int = 300, *, uid: str = UID, completed_seconds_ago: float = 1, **changes: Any) -> FinalManifest:
    """A final manifest."""
    fields: dict[str, Any] = {"adapter": "mascot.safetensors", "config_hash": "c0ffee", "start": 1}
    return FinalManifest(**{**fields, "step": step, "uid": uid, "completed_at": ago(completed_seconds_ago), **changes})


class RunBuilder:
    """A run directory, as a view; owned by the job."""

    def __init__(self) -> None:
        owner = RunFile(uid=UID, job_name="mascot", namespace="team-a", config_hash="c0ffee", created_at=ago(600))
        self._view = RunView(location=LOCATION, owner=owner)

    def _with(self, **changes: Any) -> Self:
        self._view = replace(self._view, **changes)
        return self

    def empty(self) -> Self:
        return self._with(owner=None)

    def of_another_job(self) -> Self:
        owner = RunFile(uid="other", job_name="rival", namespace="team-b", config_hash="c0ffee", created_at=ago(600))
        return self._with(owner=owner)

    def with_progress(self, step: int, **changes: Any) -> Self:
        return self._with(progress=beat(step, **changes))

    def with_checkpoints(self, *manifests: CheckpointManifest, age_seconds: float = 60) -> Self:
        moment = (NOW - timedelta(seconds=age_seconds)).timestamp()
        keys = [
            StoredObject(layout.checkpoint_folder(m.step, m.start) + name, 10, moment)
            for m in manifests
            for name in (*(file.name for file in m.files), layout.MANIFEST)
        ]
        return self._with(
            manifests=(*self._view.manifests, *manifests),
            objects=tuple(sorted((*self._view.objects, *keys), key=lambda item: item.key)),
        )

    def with_object(self, key: str, *, age_seconds: float) -> Self:
        item = StoredObject(key, 10, (NOW - timedelta(seconds=age_seconds)).timestamp())
        return self._with(objects=(*self._view.objects, item))

    def with_rejected(self, *manifests: CheckpointManifest) -> Self:
        rejected = tuple(
            RejectedCheckpoint(key=layout.checkpoint_manifest(m.step, m.start), step=m.step, reason="sha256 differs")
            for m in manifests
        )
        progress = self._view.progress or beat(0)
        return self._with(progress=progress.model_copy(update={"rejected": rejected}))

    def with_final(self, manifest: FinalManifest | None = None) -> Self:
        return self._with(final=manifest or final())

    def with_control(self, control: Control) -> Self:
        return self._with(control=control)

    def build(self) -> RunView:
        return self._view


class ObservedBuilder:
    """All that one decision is made from."""

    def __init__(self, job: JobBuilder | None = None, profile: ProfileBuilder | None = None) -> None:
        self._job, self._profile = job or JobBuilder(), profile or ProfileBuilder()
        parsed = self._profile.build()
        self._observed = Observed(
            now=NOW,
            raw=self._job.manifest(),
            status=JobStatus(),
            job=self._job.build(),
            profile=parsed,
            store=parsed.spec.stores[0],
            run=RunBuilder().empty().build(),
        )

    def at(self, seconds: float) -> Self:
        return self.seen(now=NOW + timedelta(seconds=seconds))

    def with_status(self, status: JobStatus) -> Self:
        return self.seen(status=status, raw={**self._observed.raw, "status": status_to_wire(status)})

    def with_child(self, child: ChildBuilder, *pods: PodBuilder) -> Self:
        return self.seen(child=child.build(), pods=tuple(pod.build() for pod in pods))

    def with_pods(self, *pods: PodBuilder) -> Self:
        return self.seen(pods=tuple(pod.build() for pod in pods))

    def with_run(self, run: RunBuilder) -> Self:
        return self.seen(run=run.build())

    def with_others(self, children: Sequence[ChildBuilder], strays: Sequence[PodBuilder] = ()) -> Self:
        return self.seen(
            other_children=tuple(child.build() for child in children), stray_pods=tuple(pod.build() for pod in strays)
        )

    def store_down(self, message: str = "connection refused") -> Self:
        return self.seen(run=None, store_error=message)

    def seen(self, **changes: Any) -> Self:
        self._observed = replace(self._observed, **changes)
        return self

    def build(self) -> Observed:
        return self._observed
