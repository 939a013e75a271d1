"""One machine as a cluster: API server, Job controller and kubelet for a single LoRATrainingJob, in this process.

The reconciler can't tell it from Kubernetes. Objects are plain manifests that live in memory and are saved at every change
(`local_state`); the Job controller's rules are pure (`local_jobs`); pods are processes (`local_pods`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lora_api import names
from lora_operator.adapters.local_jobs import (
    build_pod,
    count_status,
    decide,
    has_ended,
    index_of,
    mark_disrupted,
    mark_ended,
    mark_running,
    set_condition,
)
from lora_operator.adapters.local_pods import Machine, PodProcess, free_port
from lora_operator.adapters.local_state import LocalState, Objects
from lora_operator.core.times import format_time
from lora_operator.core.views import Event, EventType, JobKey, Manifest
from lora_operator.ports import Clock, RefusedError

_NOT_STARTED = 128  # exit code of a container that could not be created


class LocalCluster:
    """See `lora_operator.ports.Cluster`. `changed` is set whenever something happened that a controller would watch."""

    def __init__(
        self,
        state: LocalState,
        objects: Objects,
        *,
        profile: Manifest,
        clock: Clock,
        machine: Machine,
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self._state, self._clock, self._machine, self._on_event = state, clock, machine, on_event
        self._profile = profile
        self._job = objects.job
        self._children = {child["metadata"]["name"]: child for child in objects.children}
        self._pods = {pod["metadata"]["name"]: pod for pod in objects.pods}
        self._others: dict[tuple[str, str], Manifest] = {}  # ConfigMaps and Services: they last as long as this process
        self._processes: dict[str, PodProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports: dict[str, int] = {}
        self.changed = asyncio.Event()

    # the port -----------------------------------------------------------------------------------------------------

    async def read_job(self, key: JobKey) -> Manifest | None:
        """The one job there is."""
        return copy.deepcopy(self._job) if self._is_mine(key.namespace, key.name) else None

    async def read_profile(self, name: str) -> Manifest | None:
        """The profile that was given or made up for this run."""
        return copy.deepcopy(self._profile) if self._profile["metadata"]["name"] == name else None

    async def secret_keys(self, namespace: str, name: str) -> frozenset[str] | None:
        """The keys of the credentials that came from the environment."""
        secret = self._machine.secrets.get(name) if namespace == self._job["metadata"]["namespace"] else None
        return None if secret is None else frozenset(secret)

    async def read_children(self, key: JobKey, uid: str) -> list[Manifest]:
        """All Jobs of the job."""
        return [copy.deepcopy(child) for child in self._children.values() if _belongs(child, key, uid)]

    async def read_child(self, namespace: str, name: str) -> Manifest | None:
        """The Job of that name."""
        child = self._children.get(name)
        return copy.deepcopy(child) if child and child["metadata"]["namespace"] == namespace else None

    async def read_pods(self, key: JobKey, uid: str) -> list[Manifest]:
        """All pods of the job."""
        return [copy.deepcopy(pod) for pod in self._pods.values() if _belongs(pod, key, uid)]

    async def read_warnings(self, namespace: str, pod_names: list[str]) -> list[str]:  # noqa: ARG002 - the port's
        """Nothing: a pod that can't start here ends at once and says so itself."""
        return []

    async def create(self, manifest: Manifest) -> bool:
        """Keeps the object; a Job's pods are started."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in ("ConfigMap", "Service"):
            absent = (kind, name) not in self._others
            self._others.setdefault((kind, name), copy.deepcopy(manifest))
            return absent
        if kind != "Job":
            raise RefusedError(f"{kind} {name}: the local engine has no such kind")
        if name in self._children:
            return False
        job = copy.deepcopy(manifest)
        job["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": self._now(),
        }
        job["spec"]["suspend"] = False  # Kueue would admit it; here nobody queues
        job["status"] = {"startTime": self._now()}
        self._children[name] = job
        self._sync(name)
        return True

    async def delete_child(self, namespace: str, name: str, uid: str) -> None:
        """Removes the Job at once; its pods go when their processes have ended."""
        child = self._children.get(name)
        if child is None or child["metadata"]["uid"] != uid or child["metadata"]["namespace"] != namespace:
            return
        del self._children[name]
        for kind in ("ConfigMap", "Service"):
            self._others.pop((kind, name), None)
        for pod in self._pods_of(child):
            self._stop(pod)
        self._save()

    async def write_status(self, job: Manifest, status: Manifest) -> bool:
        """Replaces the status if nobody wrote in between."""
        return self._write(job, lambda mine: mine.update(status=copy.deepcopy(status)))

    async def write_finalizers(self, job: Manifest, finalizers: tuple[str, ...]) -> bool:
        """Replaces the finalizers if nobody wrote in between."""
        return self._write(job, lambda mine: mine["metadata"].update(finalizers=list(finalizers)))

    async def emit(self, job: Manifest, event: Event) -> None:  # noqa: ARG002 - there is one job
        """Adds the event to the job's events and shows it."""
        entry = {"time": self._now(), "type": str(event.type), "reason": event.reason, "message": event.message}
        with contextlib.suppress(OSError):  # news, not state
            self._state.append_event(entry)
        self._on_event(event)

    # what a person or a scheduler does ----------------------------------------------------------------------------

    @property
    def job(self) -> Manifest:
        """The job as it stands; not to be changed."""
        return self._job

    @property
    def is_idle(self) -> bool:
        """Whether no process runs."""
        return not self._processes

    def suspend(self) -> None:
        """`kubectl patch`: asks for the run to be saved and stopped."""
        policy = self._job["spec"].setdefault("runPolicy", {})
        if not policy.get("suspend"):
            policy["suspend"] = True
            self._job["metadata"]["generation"] += 1
            self._touch(self._job)
            self._save()

    def preempt(self, message: str) -> int:
        """What a scheduler does that needs the place: condition DisruptionTarget, then SIGTERM. Returns how many pods."""
        victims = [pod for pod in self._pods.values() if not has_ended(pod)]
        for pod in victims:
            mark_disrupted(pod, "PreemptionByScheduler", message, self._now())
            self._stop(pod)
        self._save()
        return len(victims)

    def stop(self) -> None:
        """SIGTERM to all pods, as when the machine is shut down; they stay in the API as they end."""
        for process in self._processes.values():
            process.stop()

    def kill(self) -> None:
        """SIGKILL to all pods."""
        for process in self._processes.values():
            process.kill()

    async def join(self) -> None:
        """Returns when every process has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # Job controller and kubelet -----------------------------------------------------------------------------------

    def _sync(self, name: str) -> None:
        """The Job controller looks at one of its Jobs."""
        job = self._children.get(name)
        if job is None:
            self._save()
            return
        pods = self._pods_of(job)
        decision = decide(job, pods)
        for pod in pods:
            if pod["metadata"]["name"] in decision.stop_pods:
                self._stop(pod)
        for index in decision.create_indexes:
            self._start_pod(job, index)
        if decision.failure:
            set_condition(job, "FailureTarget", *decision.failure, self._now())
            if not decision.stop_pods:
                set_condition(job, "Failed", *decision.failure, self._now())
        if decision.complete:
            set_condition(
                job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods", self._now()
            )
            job["status"]["completionTime"] = self._now()
        count_status(job, self._pods_of(job))
        self._touch(job)
        self._save()

    def _start_pod(self, job: Manifest, index: int) -> None:
        uid = str(uuid.uuid4())
        name = f"{job['metadata']['name']}-{index}-{uid[:5]}"
        pod = build_pod(job, index, name, uid, self._now())
        self._pods[name] = pod
        task = asyncio.create_task(self._run_pod(pod, self._machine_of(job)), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _machine_of(self, job: Manifest) -> Machine:
        name = job["metadata"]["name"]
        configs = {name: other.get("data", {}) for (kind, name), other in self._others.items() if kind == "ConfigMap"}
        port = self._ports.setdefault(name, free_port())  # all pods of an attempt meet there
        return dataclasses.replace(self._machine, configs=configs, port=port)

    async def _run_pod(self, pod: Manifest, machine: Machine) -> None:
        """The life of a pod."""
        name, owner = pod["metadata"]["name"], pod["metadata"]["ownerReferences"][0]["name"]
        try:
            process = await PodProcess.start(pod, self._state.pods / name, self._state.log_of(name), machine)
        except Exception as error:  # noqa: BLE001 - whatever it is, a pod that can't be made must not wait for ever
            mark_ended(pod, _NOT_STARTED, f"the process can't be started: {error!r}", self._now())
        else:
            self._processes[name] = process
            mark_running(pod, self._now())
            if "deletionTimestamp" in pod["metadata"]:
                process.stop()  # deleted while it was being started
            self._sync(owner)
            code, message = await process.wait()
            del self._processes[name]
            mark_ended(pod, code, message, self._now())
        self._touch(pod)
        if owner not in self._children or (self._is_deleted(pod) and not pod["status"].get("conditions")):
            self._pods.pop(name, None)
        self._sync(owner)

    def _stop(self, pod: Manifest) -> None:
        """Deletes a pod: SIGTERM now, gone from the API when its process has ended."""
        name = pod["metadata"]["name"]
        if has_ended(pod):
            self._pods.pop(name, None)
            return
        if not self._is_deleted(pod):
            grace = int(pod["spec"].get("terminationGracePeriodSeconds", 30))
            pod["metadata"]["deletionTimestamp"] = format_time(self._clock.now() + timedelta(seconds=grace))
            pod["metadata"]["deletionGracePeriodSeconds"] = grace
            self._touch(pod)
        if name in self._processes:
            self._processes[name].stop()

    def _pods_of(self, job: Manifest) -> list[Manifest]:
        uid = job["metadata"]["uid"]
        mine = [pod for pod in self._pods.values() if pod["metadata"]["ownerReferences"][0]["uid"] == uid]
        return sorted(mine, key=index_of)

    # the API server -----------------------------------------------------------------------------------------------

    def _is_mine(self, namespace: str, name: str) -> bool:
        return (self._job["metadata"]["namespace"], self._job["metadata"]["name"]) == (namespace, name)

    @staticmethod
    def _is_deleted(manifest: Manifest) -> bool:
        return "deletionTimestamp" in manifest["metadata"]

    def _write(self, based_on: Manifest, change: Callable[[Manifest], Any]) -> bool:
        if based_on["metadata"].get("resourceVersion") != self._job["metadata"]["resourceVersion"]:
            return False
        change(self._job)
        self._touch(self._job)
        self._save()
        return True

    @staticmethod
    def _touch(manifest: Manifest) -> None:
        manifest["metadata"]["resourceVersion"] = str(int(manifest["metadata"]["resourceVersion"]) + 1)

    def _now(self) -> str:
        return format_time(self._clock.now())

    def _save(self) -> None:
        try:
            self._state.save(Objects(self._job, list(self._children.values()), list(self._pods.values())))
        except OSError as error:
            text = f"{error.filename}: can't be written: {error.strerror}; another call may not know how this one ended"
            self._on_event(Event(EventType.WARNING, "StateNotSaved", text))
        self.changed.set()


def _belongs(manifest: Manifest, key: JobKey, uid: str) -> bool:
    metadata = manifest["metadata"]
    return bool(metadata["namespace"] == key.namespace) and bool(
        metadata.get("labels", {}).get(names.LABEL_JOB_UID) == uid
    )
