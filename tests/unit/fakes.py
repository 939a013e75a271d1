"""A small world: an API server that refuses stale writes, a Job controller, kubelets, a store, a clock, a trainer.

Every actor moves only when a test says so, so that each interleaving can be written down as a story.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from lora_api import layout, names
from lora_api.exit_codes import ExitCode, reason_of
from lora_api.profile import StoreSpec
from lora_api.run import CheckpointManifest, ExitWord, FileEntry, FinalManifest, Progress, RunFile
from lora_api.store import Store, StoredObject, StoreError
from lora_operator.core.times import format_time
from lora_operator.core.views import Manifest
from tests.contract.fake_cluster import FakeCluster
from tests.unit.builders import NOW

def _copy(document: Any) -> Any:
    """A deep copy of plain data, ten times as fast as `copy.deepcopy`."""
    return marshal.loads(marshal.dumps(document))


INDEX = "batch.kubernetes.io/job-completion-index"


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now: datetime = NOW) -> None:
        self._now = now

    def now(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)

    def text(self) -> str:
        return format_time(self._now)


@dataclass
class MemoryStore:
    """A store in memory; `error` makes every verb raise. Views of prefixes share everything."""

    clock: FakeClock
    prefix: str = ""
    data: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    trouble: dict[str, StoreError] = field(default_factory=dict)  # verb, or "all" -> what it raises
    calls: list[str] = field(default_factory=list)

    @property
    def location(self) -> str:
        return f"s3://runs/{self.prefix}"

    def put(self, key: str, data: bytes | Path) -> None:
        self._called("put", key)
        assert isinstance(data, bytes)
        self.data[self.prefix + key] = (data, self.clock.now().timestamp())

    def get(self, key: str) -> bytes | None:
        self._called("get", key)
        found = self.data.get(self.prefix + key)
        return found[0] if found else None

    def fetch(self, key: str, target: Path) -> bool:
        raise NotImplementedError

    def list(self, prefix: str = "") -> list[StoredObject]:
        self._called("list", prefix)
        whole = self.prefix + prefix
        return [
            StoredObject(key.removeprefix(self.prefix), len(data), moment)
            for key, (data, moment) in sorted(self.data.items())
            if key.startswith(whole)
        ]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._called("delete", key)
            self.data.pop(self.prefix + key, None)

    def sub(self, prefix: str) -> MemoryStore:
        return MemoryStore(self.clock, f"{self.prefix}{prefix.strip('/')}/", self.data, self.trouble, self.calls)

    def _called(self, verb: str, key: str) -> None:
        self.calls.append(f"{verb} {self.prefix}{key}")
        error = self.trouble.get("all") or self.trouble.get(verb)
        if error is not None:
            raise error


@dataclass
class FakeStores:
    """Opens the one store there is."""

    store: MemoryStore
    error: StoreError | None = None

    async def open(self, spec: StoreSpec) -> Store:
        if self.error is not None:
            raise self.error
        return self.store


class SimCluster(FakeCluster):
    """The fake API server, with deletion that takes a pod's grace period and a log of what was written."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.on_status: Callable[[Manifest, Manifest], None] = lambda _before, _after: None
        self.before_write: Callable[[], None] | None = None  # another writer comes in between, once
        self.changes = 0

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return _copy(self.objects.get((kind, namespace, name)))

    def of_kind(self, kind: str) -> list[Manifest]:
        return [_copy(stored) for place, stored in self.objects.items() if place[0] == kind]

    def _store(self, place: tuple[str, str, str], new: Manifest) -> Manifest:
        self.changes += 1
        stored = _copy(new)
        stored["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[place] = stored
        return _copy(stored)

    async def write_status(self, job: Manifest, status: Manifest) -> bool:
        if self.before_write is not None:
            hook, self.before_write = self.before_write, None
            hook()
        written = await super().write_status(job, status)
        if written:
            self.on_status(job, status)
        return written

    def vanish(self, kind: str, namespace: str, name: str) -> None:
        deadlines = {
            place: stored["metadata"].get("deletionTimestamp")
            for place, stored in self.objects.items()
            if place[0] == "Pod"
        }
        super().vanish(kind, namespace, name)
        self.changes += 1
        for place, deadline in deadlines.items():
            metadata = self.objects[place]["metadata"] if place in self.objects else {}
            if metadata.get("deletionTimestamp") in (None, deadline):
                continue
            del metadata["deletionTimestamp"]  # the parent's knows no clock
            if deadline is None:
                self.delete_pod(self.objects[place])
            else:
                metadata["deletionTimestamp"] = deadline

    def delete_pod(self, pod: Manifest) -> None:
        """As `kubectl delete pod`: SIGTERM now, SIGKILL after the grace period."""
        place = ("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])
        stored = self.objects[place]
        if "deletionTimestamp" not in stored["metadata"]:
            grace = stored["spec"].get("terminationGracePeriodSeconds", 30)
            moment = format_time(self.clock.now() + timedelta(seconds=grace))
            self._store(place, {**stored, "metadata": {**stored["metadata"], "deletionTimestamp": moment}})

    def touch(self, kind: str, namespace: str, name: str) -> None:
        """Another writer: nothing that matters changes, but the resourceVersion does."""
        place = (kind, namespace, name)
        self._store(place, self.objects[place])

    def save(self, manifest: Manifest) -> None:
        """Whatever a controller changed."""
        metadata = manifest["metadata"]
        self._store((manifest["kind"], metadata["namespace"], metadata["name"]), manifest)

    def create_now(self, manifest: Manifest) -> Manifest:
        """As another controller creates it."""
        return self._insert(manifest)


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
        return [job for job in self.cluster.of_kind("Job") if LABEL in job["metadata"].get("labels", {})]

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


LABEL = names.LABEL_JOB_UID


class Trainer:
    """What the pods of a start do, as far as an operator can see it. Saves every 100 steps when it is asked to move."""

    def __init__(self, store: MemoryStore, kubernetes: Kubernetes, clock: FakeClock, *, uid: str, steps: int) -> None:
        self.store, self.kubernetes, self.clock, self.uid, self.steps = store, kubernetes, clock, uid, steps
        self.start, self.attempt, self.step, self.lost, self.resumed = 0, 0, 0, 0, None  # type: ignore[var-annotated]
        self._pod = ""
        self.stride = 50  # steps of one move
        self.saves = True  # when it is asked to stop
        self.hangs = False

    def move(self) -> None:
        """Goes on by some steps in the pod that runs; leaves when it is asked to, or done."""
        pods = self.kubernetes.pods()
        reachable = [pod for pod in pods if pod["spec"].get("nodeName") not in self.kubernetes.lost_nodes]
        running = [pod for pod in reachable if pod["status"]["phase"] == "Running"]
        for pod in [pod for pod in running if "deletionTimestamp" in pod["metadata"]]:
            self._asked_to_stop(pod)
        running = [pod for pod in running if "deletionTimestamp" not in pod["metadata"]]
        if not running or self.hangs:
            return
        lead = running[0]
        if lead["metadata"]["name"] != self._pod:
            self._begin(lead)
        elif self.step < self.steps:
            self.step += self.stride
            self.beat("Training")
            if self.step % 100 == 0:
                self.save()
        else:
            self.finish()
            for pod in running:
                self.kubernetes.end_pod(pod, 0, self._word(ExitCode.DONE))

    def _begin(self, pod: Manifest) -> None:
        self._pod = pod["metadata"]["name"]
        self.attempt = int(pod["metadata"]["labels"][names.LABEL_ATTEMPT])
        self.start += 1
        if self.store.get(layout.RUN_FILE) is None:
            owner = RunFile(
                uid=self.uid, job_name="mascot", namespace="team-a", config_hash="c", created_at=self.clock.text()
            )
            self._put(layout.RUN_FILE, owner)
        keys = [item.key for item in self.store.list(layout.CHECKPOINTS)]
        steps = [int(key.split("step-")[1][:9]) for key in keys if layout.is_checkpoint_manifest(key)]
        newest = max(steps, default=None)
        self.lost += max(0, self.step - (newest or 0))
        self.step, self.resumed = newest or 0, newest
        self.beat("Initializing")

    def _asked_to_stop(self, pod: Manifest) -> None:
        if pod["metadata"]["name"] == self._pod and self.saves:
            self.save()
            self.beat("Training", end=self._word(ExitCode.PREEMPTED))
        self.kubernetes.end_pod(
            pod, int(ExitCode.PREEMPTED) if self.saves else 137, self._word(ExitCode.PREEMPTED) if self.saves else None
        )

    def beat(self, stage: str, *, end: ExitWord | None = None, **changes: Any) -> None:
        """A heartbeat."""
        fields: dict[str, Any] = {
            "start": self.start,
            "attempt": self.attempt,
            "stage": stage,
            "step": self.step,
            "steps": self.steps,
            "loss": 1.0,
            "eta_seconds": float(self.steps - self.step),
            "resumed_from_step": self.resumed,
            "lost_steps": self.lost,
            "updated_at": self.clock.text(),
            "exit": end,
        }
        self._put(layout.PROGRESS, Progress(**{**fields, **changes}))

    def save(self) -> None:
        """Commits a checkpoint."""
        folder = layout.checkpoint_folder(self.step, self.start)
        self.store.put(folder + "adapter.safetensors", b"x" * 10)
        manifest = CheckpointManifest(
            step=self.step,
            start=self.start,
            attempt=self.attempt,
            uid=self.uid,
            config_hash="c",
            committed_at=self.clock.text(),
            files=(FileEntry(name="adapter.safetensors", size_bytes=10, sha256="00"),),
        )
        self._put(folder + layout.MANIFEST, manifest)

    def finish(self) -> None:
        """Commits the result."""
        self.beat("Finalizing", end=self._word(ExitCode.DONE))
        manifest = FinalManifest(
            step=self.step,
            start=self.start,
            uid=self.uid,
            config_hash="c",
            completed_at=self.clock.text(),
            adapter="mascot.safetensors",
        )
        self._put(layout.FINAL_MANIFEST, manifest)

    def _word(self, code: ExitCode) -> ExitWord:
        return ExitWord(code=int(code), reason=reason_of(code), message=f"left at step {self.step}", step=self.step)

    def _put(self, key: str, document: Any) -> None:
        self.store.put(key, document.model_dump_json(by_alias=True).encode())


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

