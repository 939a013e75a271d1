"""What the Job controller and the kubelet write, as pure functions over plain manifests: the local engine's rules.

Only the part of batch/v1 that the operator's children use: Indexed, restartPolicy Never, backoffLimit, podFailurePolicy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lora_api.names import TRAINER_CONTAINER
from lora_operator.core.views import Manifest

INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"
DISRUPTION = "DisruptionTarget"


@dataclass(frozen=True)
class JobDecision:
    """What the Job controller does next."""

    failure: tuple[str, str] | None = None  # reason and message
    complete: bool = False
    create_indexes: tuple[int, ...] = ()
    stop_pods: tuple[str, ...] = ()


def build_pod(job: Manifest, index: int, name: str, uid: str, now: str) -> Manifest:
    """The pod of one completion index, before it is started."""
    template = job["spec"]["template"]
    labels = template.get("metadata", {}).get("labels", {})
    annotations = template.get("metadata", {}).get("annotations", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job["metadata"]["namespace"],
            "uid": uid,
            "resourceVersion": "1",
            "creationTimestamp": now,
            "labels": labels | {JOB_NAME: job["metadata"]["name"], INDEX: str(index)},
            "annotations": annotations | {INDEX: str(index)},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": job["metadata"]["name"],
                    "uid": job["metadata"]["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": template["spec"] | {"nodeName": "localhost"},
        "status": {"phase": "Pending", "startTime": now},
    }


def index_of(pod: Manifest) -> int:
    """The pod's completion index."""
    return int(pod["metadata"]["annotations"][INDEX])


def has_ended(pod: Manifest) -> bool:
    """Whether the pod's process runs no more."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def container_of(pod: Manifest) -> dict[str, Any]:
    """The container that is run: the one called `trainer`, or the only one."""
    containers = pod["spec"]["containers"]
    named = [container for container in containers if container["name"] == TRAINER_CONTAINER]
    return dict((named or containers)[0])


def mark_running(pod: Manifest, now: str) -> None:
    """What the kubelet writes when the process has begun."""
    container = container_of(pod)
    pod["status"]["phase"] = "Running"
    pod["status"]["containerStatuses"] = [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
    ]


def mark_ended(pod: Manifest, exit_code: int, message: str, now: str) -> None:
    """What the kubelet writes when the process has ended; `message` is the termination log."""
    container = container_of(pod)
    terminated = {"exitCode": exit_code, "reason": "Completed" if exit_code == 0 else "Error", "finishedAt": now}
    if exit_code > 128:
        terminated["signal"] = exit_code - 128
    if message:
        terminated["message"] = message
    pod["status"]["phase"] = "Succeeded" if exit_code == 0 else "Failed"
    pod["status"]["containerStatuses"] = [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "ready": False,
            "started": False,
            "restartCount": 0,
            "state": {"terminated": terminated},
        }
    ]


def mark_disrupted(pod: Manifest, reason: str, message: str, now: str) -> None:
    """The condition by which a scheduler or a node says that it, not the program, ends the pod."""
    others = [c for c in pod["status"].get("conditions", []) if c["type"] != DISRUPTION]
    condition = {"type": DISRUPTION, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}
    pod["status"]["conditions"] = [*others, condition]


def set_condition(job: Manifest, kind: str, reason: str, message: str, now: str) -> None:
    """Adds a condition of a batch/v1 Job; a condition once true stays as it is."""
    conditions = job["status"].setdefault("conditions", [])
    if not has_condition(job, kind):
        conditions.append(
            {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}
        )


def has_condition(job: Manifest, kind: str) -> bool:
    """Whether the Job has that condition."""
    return any(c["type"] == kind and c["status"] == "True" for c in job["status"].get("conditions", []))


def decide(job: Manifest, pods: list[Manifest]) -> JobDecision:
    """The Job controller's next act, from the Job and all of its pods."""
    if has_condition(job, "Failed") or has_condition(job, "Complete"):
        return JobDecision()
    active = [pod for pod in pods if not has_ended(pod)]
    failure = _failure(job, [pod for pod in pods if pod["status"]["phase"] == "Failed"])
    if failure:
        return JobDecision(failure=failure, stop_pods=tuple(pod["metadata"]["name"] for pod in active))
    done = {index_of(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
    wanted = set(range(job["spec"].get("completions", 1)))
    missing = wanted - done - {index_of(pod) for pod in active}
    return JobDecision(complete=done >= wanted, create_indexes=tuple(sorted(missing)))


def count_status(job: Manifest, pods: list[Manifest]) -> None:
    """The counters of the Job's status."""
    phases = [pod["status"]["phase"] for pod in pods]
    job["status"] |= {
        "active": sum(phase in ("Pending", "Running") for phase in phases),
        "ready": phases.count("Running"),
        "succeeded": phases.count("Succeeded"),
        "failed": phases.count("Failed"),
    }


def _failure(job: Manifest, failed: list[Manifest]) -> tuple[str, str] | None:
    counted = 0
    for pod in failed:
        action, why = policy_action(job, pod)
        if action == "FailJob":
            return "PodFailurePolicy", why
        counted += action == "Count"
    if counted > job["spec"].get("backoffLimit", 6):
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None


def policy_action(job: Manifest, pod: Manifest) -> tuple[str, str]:
    """What the first podFailurePolicy rule that fits a failed pod asks for (FailJob, Ignore, Count), in whose words."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", [])):
        if _fits_conditions(rule.get("onPodConditions"), pod):
            fact = f"Pod {name} has condition {rule['onPodConditions'][0]['type']}"
        elif _fits_exit_code(rule.get("onExitCodes"), pod):
            container = container_of(pod)["name"]
            fact = f"Container {container} for pod {name} failed with exit code {exit_code_of(pod)}"
        else:
            continue
        action = str(rule["action"])
        return ("Count" if action == "FailIndex" else action), f"{fact} matching {action} rule at index {number}"
    return "Count", ""


def exit_code_of(pod: Manifest) -> int | None:
    """The exit code of the pod's container; None while it runs."""
    for status in pod["status"].get("containerStatuses", []):
        terminated = status["state"].get("terminated")
        if terminated:
            return int(terminated["exitCode"])
    return None


def _fits_conditions(patterns: list[dict[str, str]] | None, pod: Manifest) -> bool:
    seen = {(c["type"], c["status"]) for c in pod["status"].get("conditions", [])}
    return any((pattern["type"], pattern.get("status", "True")) in seen for pattern in patterns or [])


def _fits_exit_code(pattern: dict[str, Any] | None, pod: Manifest) -> bool:
    code = exit_code_of(pod)
    if not pattern or not code:
        return False
    return bool((code in pattern["values"]) == (pattern["operator"] == "In"))
