"""What the API server decides when a manifest is applied: identity, generation, what may not change. Pure.

And what starting the same job again means: go on, begin another try after a failure, or nothing, since it has succeeded.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator
from typing import Any

from lora_api import names
from lora_api.config import MUTABLE_CONFIG_PATHS
from lora_api.job import ConditionType, LoRATrainingJob, status_to_wire
from lora_api.problems import InvalidDocument, Problem, parse
from lora_operator.adapters.local_jobs import has_ended, mark_disrupted, mark_ended, set_condition
from lora_operator.adapters.local_state import Objects
from lora_operator.core.conditions import holds
from lora_operator.core.read import exit_word, read_status
from lora_operator.core.views import Manifest

_FREE = {("device",), ("performance_log_every",), *MUTABLE_CONFIG_PATHS}
_KILLED = 137
_STOPPED = "lora-operator was stopped"


def run_uid(location: str, output_path: str, namespace: str, name: str) -> str:
    """The job's uid: the same for the same job in the same place, so that another call goes on with the run."""
    text = json.dumps(["lora-operator", location, output_path, namespace, name])
    return str(uuid.uuid5(uuid.NAMESPACE_URL, text))


def admit(manifest: Manifest, saved: Objects | None, uid: str, now: str) -> Objects:
    """The objects to begin with: the manifest with the identity, status and children that were saved.

    Raises:
        InvalidDocument: When something changed that defines the run.
    """
    job = {key: copy.deepcopy(manifest[key]) for key in ("apiVersion", "kind", "metadata", "spec")}
    if saved is None:
        job["metadata"] |= {"uid": uid, "generation": 1, "resourceVersion": "1", "creationTimestamp": now}
        return Objects(job)
    problems = immutable_changes(saved.job["spec"], job["spec"])
    if problems:
        raise InvalidDocument(problems)
    before = saved.job["metadata"]
    changed = saved.job["spec"] != job["spec"]
    job["metadata"] |= {
        "uid": before["uid"],
        "generation": before["generation"] + (1 if changed else 0),
        "resourceVersion": str(int(before["resourceVersion"]) + 1),
        "creationTimestamp": before["creationTimestamp"],
        "finalizers": before.get("finalizers", []),
    }
    if "status" in saved.job:
        job["status"] = saved.job["status"]
    return Objects(job, saved.children, saved.pods)


def immutable_changes(before: Manifest, after: Manifest) -> list[Problem]:
    """Fields of the spec that differ and define the run, each with both values."""
    pairs = []
    old, new = (parse(LoRATrainingJob, _envelope(spec)) for spec in (before, after))
    wires = (old.spec.config.model_dump(mode="json"), new.spec.config.model_dump(mode="json"))
    for path, was, is_now in _differences(*wires):
        if not any(path[: len(free)] == free for free in _FREE):
            pairs.append((("config", *path), was, is_now))
    for field in ("store", "path"):
        was, is_now = getattr(old.spec.output, field), getattr(new.spec.output, field)
        if was != is_now:
            pairs.append((("output", field), was, is_now))
    return [Problem(_render(path), _cannot_change(was, is_now)) for path, was, is_now in pairs]


def begin_again(objects: Objects) -> bool:
    """After a failure, makes the next attempt a fresh try that resumes from the newest checkpoint. Returns whether it did."""
    status = read_status(objects.job)
    if not holds(status, ConditionType.FAILED):
        return False
    fresh = {
        key: value for key, value in status_to_wire(status).items() if key in ("checkpoints", "lostSteps", "output")
    }
    attempt = status.attempt + 1
    fresh |= {"attempt": attempt, "childName": names.child_name(objects.job["metadata"]["name"], attempt)}
    if status.start_time:
        fresh["startTime"] = status.start_time
    objects.job["status"] = fresh if status.attempt else {}
    objects.children.clear()
    objects.pods.clear()
    return True


def end_leftovers(objects: Objects, messages: dict[str, str], now: str) -> None:
    """Writes down how the pods of a run that was killed ended: as a node's kubelet does that was shut down.

    Args:
        objects: As saved; changed in place.
        messages: Pod name -> termination message.
        now: RFC 3339.
    """
    for pod in objects.pods:
        if has_ended(pod):
            continue
        message = messages.get(pod["metadata"]["name"], "")
        word = exit_word(message)
        mark_disrupted(pod, "TerminationByKubelet", _STOPPED, now)
        mark_ended(pod, word.code if word else _KILLED, message, now)
    for child in objects.children:
        why = f"Pod of {child['metadata']['name']} has condition DisruptionTarget: {_STOPPED}"
        for condition in ("FailureTarget", "Failed"):
            if not any(c["type"] == "Complete" for c in child["status"].get("conditions", [])):
                set_condition(child, condition, "PodFailurePolicy", why, now)


def _envelope(spec: Manifest) -> Manifest:
    return {
        "apiVersion": "lora-operator.io/v1alpha1",
        "kind": "LoRATrainingJob",
        "metadata": {"name": "same"},
        "spec": spec,
    }


def _differences(was: Any, is_now: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Innermost paths at which two wires differ."""
    if isinstance(was, dict) and isinstance(is_now, dict):
        for key in {**was, **is_now}:
            yield from _differences(was.get(key), is_now.get(key), (*path, key))
    elif (
        isinstance(was, list)
        and isinstance(is_now, list)
        and len(was) == len(is_now)
        and was
        and isinstance(was[0], dict)
    ):
        for index, pair in enumerate(zip(was, is_now, strict=True)):
            yield from _differences(*pair, (*path, f"[{index}]"))
    elif was != is_now:
        yield path, was, is_now


def _render(path: tuple[str, ...]) -> str:
    return ".".join(("spec", *path)).replace(".[", "[")


def _cannot_change(was: Any, is_now: Any) -> str:
    def show(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 60 else text[:57] + "..."

    return f"is {show(is_now)}, but the run was begun with {show(was)}, and this defines the run"
