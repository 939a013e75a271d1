"""Job controller, scheduler and kubelets. Each moves only when a test says so, so that every interleaving can be told."""

from __future__ import annotations

import json

from lora_api import names
from lora_api.run import ExitWord
from lora_operator.core.views import Manifest
from tests.unit.fakes import FakeClock, SimCluster

INDEX = "batch.kubernetes.io/job-completion-index"


class Kubernetes:
    """Job controller, scheduler and kubelets over a SimCluster."""

    def __init__(self, cluster: SimCluster, clock: FakeClock) -> None:
        self.cluster, self.clock = cluster, clock
        self.unschedulable: str | None = None  # the scheduler's words while it finds no place
        self.waiting: dict[str, str] | None = None  # state.waiting of containers that don't start
        self.kueue = False  # every new Job is created suspended, as Kueue's webhook does
        self.lost_nodes: set[str] = set()
        self.suspension_fails_jobs = False  # the Job controller sees how a pod ended that it deleted by suspending
        self._serial = 0

    def pods(self, job: str | None = None) -> list[Manifest]:
        found = self.cluster.of_kind("Pod")
        return [pod for pod in found if job is None or pod["metadata"]["ownerReferences"][0]["name"] == job]

    def jobs(self) -> list[Manifest]:
        return [job for job in self.cluster.of_kind("Job") if names.LABEL_JOB_UID in job["metadata"].get("labels", {})]

    def settle(self) -> None:
        """Controllers and kubelets do what there is to do, but trainers don't move."""
        for _ in range(6):
            before = self.cluster.changes
            self.schedule()
            for job in self.jobs():
                self.sync(job)
            self.remove_ended()
            if self.cluster.changes == before:
                break

    def schedule(self) -> None:
        """The scheduler binds, the kubelet starts."""
        for pod in self.pods():
            if pod["status"]["phase"] != "Pending":
                continue
            if self.unschedulable:
                condition = {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": self.unschedulable,
                }
                self._pod_status(pod, {"phase": "Pending", "conditions": [condition]})
            elif self.waiting:
                container = {"name": names.TRAINER_CONTAINER, "state": {"waiting": self.waiting}}
                self._pod_status(pod, {"phase": "Pending", "containerStatuses": [container]})
            else:
                pod["spec"]["nodeName"] = f"node-{pod['metadata']['annotations'][INDEX]}"
                running = {"running": {"startedAt": self.clock.text()}}
                container = {"name": names.TRAINER_CONTAINER, "state": running}
                self._pod_status(pod, {"phase": "Running", "containerStatuses": [container]})

    def _pod_status(self, pod: Manifest, status: Manifest) -> None:
        if pod["status"] != status:
            self.cluster.save({**pod, "status": status})

    def sync(self, job: Manifest) -> None:
        """The Job controller: Indexed, backoffLimit 0, podFailurePolicy, podReplacementPolicy Failed."""
        job = self.cluster.get("Job", job["metadata"]["namespace"], job["metadata"]["name"]) or job
        if self.kueue and "kueue" not in job["metadata"]["labels"]:
            job["metadata"]["labels"]["kueue"] = "seen"
            job["spec"]["suspend"] = True
            self.cluster.save(job)
        if has(job, "Failed") or has(job, "Complete"):
            return
        pods = self.pods(job["metadata"]["name"])
        active = [pod for pod in pods if not ended(pod)]
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        if job["spec"].get("suspend") and not self.suspension_fails_jobs:
            failed = [pod for pod in failed if "deletionTimestamp" not in pod["metadata"]]
        why = find(job, "FailureTarget") or next(filter(None, (failure_of(pod) for pod in failed)), None)
        if why:
            mark(job, "FailureTarget", why)
            for pod in active:
                self.cluster.delete_pod(pod)
            if not active:
                mark(job, "Failed", why)
            self.cluster.save(job)
        elif job["spec"].get("suspend"):
            for pod in active:
                self.cluster.delete_pod(pod)
        elif sum(pod["status"]["phase"] == "Succeeded" for pod in pods) >= job["spec"]["completions"]:
            mark(job, "Complete", "Reached expected number of succeeded pods")
            self.cluster.save(job)
        else:
            self._create_missing(job, pods)

    def _create_missing(self, job: Manifest, pods: list[Manifest]) -> None:
        if "startTime" not in job.setdefault("status", {}):
            job["status"]["startTime"] = self.clock.text()
            self.cluster.save(job)
        there = {pod["metadata"]["annotations"][INDEX] for pod in pods if pod["status"]["phase"] != "Failed"}
        for index in map(str, range(job["spec"]["completions"])):
            if index in there:
                continue
            self._serial += 1
            name = f"{job['metadata']['name']}-{index}-{self._serial:05d}"
            owner = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"], "controller": True}
            self.cluster.create_now(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": name,
                        "namespace": job["metadata"]["namespace"],
                        "labels": dict(job["spec"]["template"]["metadata"]["labels"]),
                        "annotations": {INDEX: index},
                        "ownerReferences": [owner],
                    },
                    "spec": json.loads(json.dumps(job["spec"]["template"]["spec"])),
                    "status": {"phase": "Pending"},
                }
            )

    def remove_ended(self) -> None:
        """The API server lets deleted pods go once their containers have ended."""
        for pod in self.pods():
            never_ran = pod["status"]["phase"] == "Pending"
            if "deletionTimestamp" in pod["metadata"] and (ended(pod) or never_ran):
                metadata = pod["metadata"]
                self.cluster.vanish("Pod", metadata["namespace"], metadata["name"])

    def end_pod(self, pod: Manifest, code: int, said: ExitWord | None = None, *, oom: bool = False) -> None:
        """The kubelet reports how the container ended."""
        reason = "OOMKilled" if oom else "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason, "message": said.model_dump_json() if said else ""}
        container = {"name": names.TRAINER_CONTAINER, "state": {"terminated": terminated}}
        status = {**pod["status"], "phase": "Failed" if code else "Succeeded", "containerStatuses": [container]}
        self.cluster.save({**pod, "status": status})

    def disrupt(self, pod: Manifest, message: str) -> None:
        """A scheduler or a node takes the place back."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "Preempted", "message": message}
        self.cluster.save({**pod, "status": {**pod["status"], "conditions": [condition]}})
        self.cluster.delete_pod(pod)

    def suspend_child(self, suspend: bool = True) -> None:
        """Kueue gives and takes."""
        job = self.jobs()[-1]
        job["spec"]["suspend"] = suspend
        if not suspend:
            job.setdefault("status", {})["startTime"] = self.clock.text()
        self.cluster.save(job)


def has(job: Manifest, kind: str) -> bool:
    """Whether a Job has a condition."""
    return find(job, kind) is not None


def find(job: Manifest, kind: str) -> str | None:
    """The message of a Job's condition."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((c["message"] for c in conditions if c["type"] == kind), None)


def mark(job: Manifest, kind: str, message: str) -> None:
    """Adds a condition to a Job."""
    if not has(job, kind):
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        conditions.append({"type": kind, "status": "True", "message": message})


def ended(pod: Manifest) -> bool:
    """Whether its containers run no more."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def failure_of(pod: Manifest) -> str:
    """What the Job controller says about a failed pod."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    if any(c["type"] == "DisruptionTarget" for c in pod["status"].get("conditions", [])):
        return f"Pod {where} has condition DisruptionTarget matching FailJob rule at index 0"
    states = [c["state"] for c in pod["status"].get("containerStatuses", [])]
    code = next((state["terminated"]["exitCode"] for state in states if "terminated" in state), None)
    if code in {64, 65, 66, 77, 85, 86, 87}:
        return f"Container trainer for pod {where} failed with exit code {code} matching FailJob rule at index 1"
    return "Job has reached the specified backoff limit"
