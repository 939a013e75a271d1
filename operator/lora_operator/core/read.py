"""Kubernetes manifests as small views. Pure: manifests in, views out."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from lora_api import names
from lora_api.job import KIND, JobStatus
from lora_api.run import ExitWord
from lora_operator.core.times import parse_time
from lora_operator.core.views import ChildView, Manifest, PodView

_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_GRACE_SLACK = timedelta(seconds=30)  # the kubelet needs a moment to report after the grace period


def read_status(raw: Manifest) -> JobStatus:
    """The status of a job as read, without what this version can't read.

    What another version wrote beside it (a field that is new) must not make a finished job begin again.
    """
    status = raw.get("status") or {}
    try:
        return JobStatus.model_validate(status)
    except ValidationError as error:
        status = copy.deepcopy(status)
        for detail in error.errors():
            _remove(status, detail["loc"], whole_field=detail["type"] != "extra_forbidden")
    try:
        return JobStatus.model_validate(status)
    except ValidationError:
        return JobStatus()


def _remove(status: Any, place: tuple[int | str, ...], *, whole_field: bool) -> None:
    """Removes an unknown key, or the whole field of the status in which something is wrong."""
    *parents, last = place[:1] if whole_field else place
    for part in parents:
        status = status[part]
    if isinstance(status, dict):
        status.pop(last, None)


def child_view(manifest: Manifest, job_uid: str) -> ChildView:
    """A batch/v1 Job."""
    metadata = manifest["metadata"]
    owners = metadata.get("ownerReferences") or []
    conditions = _conditions(manifest)
    return ChildView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        ours=any(owner.get("uid") == job_uid for owner in owners),
        attempt=_number((metadata.get("labels") or {}).get(names.LABEL_ATTEMPT)),
        suspended=bool(manifest.get("spec", {}).get("suspend")),
        terminating=metadata.get("deletionTimestamp") is not None,
        failing=conditions.get("FailureTarget"),
        failed=conditions.get("Failed"),
        complete="Complete" in conditions,
        created_at=parse_time(metadata.get("creationTimestamp")),
        started_at=parse_time((manifest.get("status") or {}).get("startTime")),
        of_a_job=any(owner.get("kind") == KIND for owner in owners),
    )


def pod_view(manifest: Manifest, now: datetime) -> PodView:
    """A pod of an attempt."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    conditions = _conditions(manifest)
    container: dict[str, Any] = next(
        (c for c in status.get("containerStatuses") or [] if c["name"] == names.TRAINER_CONTAINER), {}
    )
    state = container.get("state") or {}
    terminated, waiting, running = (state.get(key) or {} for key in ("terminated", "waiting", "running"))
    deadline = parse_time(metadata.get("deletionTimestamp"))
    scheduled: dict[str, Any] = next((c for c in status.get("conditions") or [] if c["type"] == "PodScheduled"), {})
    index = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}.get(_COMPLETION_INDEX)
    return PodView(
        name=metadata["name"],
        index=_number(index),
        phase=status.get("phase", "Pending"),
        terminating=deadline is not None,
        grace_over=deadline is not None and now > deadline + _GRACE_SLACK,
        disrupted=conditions.get("DisruptionTarget"),
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else None,
        waiting=_waiting(waiting),
        exit_code=terminated.get("exitCode"),
        oom_killed=terminated.get("reason") == "OOMKilled",
        word=exit_word(terminated.get("message")),
        started_at=parse_time(running.get("startedAt")),
        node=(manifest.get("spec") or {}).get("nodeName"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
    )


def attempt_of(manifest: Manifest) -> int:
    """The attempt that an object's label names; 0 without one."""
    return _number((manifest["metadata"].get("labels") or {}).get(names.LABEL_ATTEMPT))


def exit_word(message: str | None) -> ExitWord | None:
    """The trainer's last word: the newest line of a termination message that is one."""
    for line in reversed((message or "").strip().splitlines()):
        if line.startswith("{"):
            try:
                return ExitWord.model_validate_json(line)
            except ValidationError:
                continue
    return None


def _waiting(waiting: dict[str, Any]) -> str | None:
    reason = waiting.get("reason", "")
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return None
    return f"{reason}: {waiting['message']}" if waiting.get("message") else reason


def _conditions(manifest: Manifest) -> dict[str, str]:
    """Type -> "message" (or the reason) of every condition that is True."""
    found = {}
    for condition in (manifest.get("status") or {}).get("conditions") or []:
        if condition.get("status") == "True":
            found[condition["type"]] = condition.get("message") or condition.get("reason") or condition["type"]
    return found


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
