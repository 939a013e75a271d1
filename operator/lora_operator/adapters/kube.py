"""A Kubernetes cluster behind the port of `lora_operator.ports`.

Single objects are read as they are now; lists, profiles and secrets from the server's cache, which is milliseconds
old. A list that has to be current makes the server wait until its cache has caught up with every write to anything,
which takes it 50 ms and more; and current as it may be, the next pod can appear a moment later.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Sequence

from lora_api.job import API_VERSION, PLURAL
from lora_api.names import LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY
from lora_api.profile import PROFILE_PLURAL
from lora_operator.adapters.kube_api import MERGE_PATCH, KubeApi, path
from lora_operator.adapters.kube_events import EventRecorder
from lora_operator.core.views import Event, JobKey, Manifest
from lora_operator.ports import Clock, ClusterError, RefusedError

_FROM_CACHE = {"resourceVersion": "0"}
_BATCH = "batch/v1"
_EVENTS_READ_ONE_BY_ONE = 4  # pods; for more of them all warnings of the namespace are read at once
_PLURALS = {"Job": "jobs", "Service": "services", "ConfigMap": "configmaps"}


class KubeCluster:
    """See `lora_operator.ports.Cluster`. All methods raise ClusterError when the server can't be asked."""

    def __init__(self, api: KubeApi, clock: Clock, *, instance: str = MANAGED_BY) -> None:
        """A cluster over a logged-in connection.

        Args:
            api: The connection; not closed by the cluster.
            clock: Stamps events.
            instance: Name of this process in events, such as its pod's name.
        """
        self._api = api
        self._recorder = EventRecorder(api, clock, instance=instance)

    async def read_job(self, key: JobKey) -> Manifest | None:
        """The LoRATrainingJob; None when it is gone."""
        return await self._api.get(path(API_VERSION, PLURAL, key.namespace, key.name))

    async def read_profile(self, name: str) -> Manifest | None:
        """The LoRATrainingProfile; None when there is none of that name."""
        return await self._api.get(path(API_VERSION, PROFILE_PLURAL, None, name), _FROM_CACHE)

    async def secret_keys(self, namespace: str, name: str) -> frozenset[str] | None:
        """The keys of a Secret in a job's namespace, without its values; None when there is none."""
        secret = await self._api.get(path("v1", "secrets", namespace, name), _FROM_CACHE)
        return None if secret is None else frozenset(secret.get("data") or {})

    async def read_secret(self, namespace: str, name: str) -> dict[str, bytes] | None:
        """The decoded values of a Secret; None when there is none. Not part of the port: for the operator's own."""
        secret = await self._api.get(path("v1", "secrets", namespace, name))
        if secret is None:
            return None
        try:
            return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        except binascii.Error as error:
            raise ClusterError(f"secret {namespace}/{name} is not base64: {error}") from error

    async def read_children(self, key: JobKey, uid: str) -> list[Manifest]:
        """All batch/v1 Jobs labelled with the job's uid."""
        return await self._api.list(path(_BATCH, "jobs", key.namespace), _labelled(uid))

    async def read_child(self, namespace: str, name: str) -> Manifest | None:
        """The batch/v1 Job of that name, whoever owns it."""
        return await self._api.get(path(_BATCH, "jobs", namespace, name))

    async def read_pods(self, key: JobKey, uid: str) -> list[Manifest]:
        """All pods labelled with the job's uid, of every attempt."""
        return await self._api.list(path("v1", "pods", key.namespace), _labelled(uid))

    async def read_warnings(self, namespace: str, pod_names: list[str]) -> list[str]:
        """Newest warning event text of each of these pods, as `Reason: message`, in the order of the names."""
        selectors = ["involvedObject.kind=Pod,type=Warning"]
        if len(pod_names) <= _EVENTS_READ_ONE_BY_ONE:
            selectors = [f"{selectors[0]},involvedObject.name={name}" for name in pod_names]
        newest: dict[str, tuple[str, str]] = {}
        for selector in selectors:
            async for event in self._api.pages(path("v1", "events", namespace), {"fieldSelector": selector}):
                pod = event["involvedObject"].get("name", "")
                newest[pod] = max(
                    newest.get(pod, ("", "")), (_said_at(event), f"{event.get('reason')}: {event.get('message')}")
                )
        return [newest[name][1] for name in pod_names if name in newest]

    async def create(self, manifest: Manifest) -> bool:
        """Creates the object; False when one of that name is there already.

        Raises:
            RefusedError: With the server's message: invalid, forbidden, over quota, or its namespace is gone.
        """
        meta = manifest["metadata"]
        where = path(manifest["apiVersion"], _PLURALS[manifest["kind"]], meta["namespace"])
        answer = await self._api.request("POST", where, body=manifest)
        # 409 also says that a quota was just being counted: that is worth another try
        if answer.code == 409 and answer.reason == "AlreadyExists":
            return False
        if answer.code == 404:  # the namespace is gone
            raise RefusedError(answer.message)
        answer.require_ok()
        return True

    async def delete_child(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the Job (only if it has this uid), its pods with their grace period, its Service and ConfigMap.

        The Job goes first: were it last, a crash in between would leave pods that can't find each other. In the
        background, as a Job that waits for its pods could hold up its namespace when a node is lost; pods are watched
        by label, not through their Job.
        """
        job = await self.read_child(namespace, name)
        if job is not None:
            if job["metadata"]["uid"] != uid:
                return  # another object of that name: not ours to delete, and neither is what goes with it
            await self._delete(path(_BATCH, "jobs", namespace, name), uid)
        for plural in ("services", "configmaps"):
            where = path("v1", plural, namespace, name)
            companion = await self._api.get(where)
            if companion is not None and _goes_with(companion, job):
                await self._delete(where, companion["metadata"]["uid"])

    async def _delete(self, where: str, uid: str) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        answer = await self._api.request("DELETE", where, body=options)
        if answer.code not in (404, 409):  # gone, or replaced since we looked
            answer.require_ok()

    async def write_status(self, job: Manifest, status: Manifest) -> bool:
        """Replaces the whole status if the job still has `job`'s resourceVersion; False on a conflict or when it is gone."""
        meta = job["metadata"]
        kept = {key: meta[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "metadata": kept,
            "spec": job["spec"],
            "status": status,
        }
        where = path(API_VERSION, PLURAL, meta["namespace"], meta["name"], "status")
        return await self._write("PUT", where, body)

    async def write_finalizers(self, job: Manifest, finalizers: tuple[str, ...]) -> bool:
        """Replaces the finalizers if the job still has `job`'s resourceVersion; False on a conflict or when gone."""
        meta = job["metadata"]
        patch = {
            "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"], "finalizers": list(finalizers)}
        }
        return await self._write("PATCH", path(API_VERSION, PLURAL, meta["namespace"], meta["name"]), patch)

    async def _write(self, method: str, where: str, body: Manifest) -> bool:
        answer = await self._api.request(
            method, where, body=body, content_type=MERGE_PATCH if method == "PATCH" else "application/json"
        )
        if answer.code in (404, 409):
            return False
        answer.require_ok()
        return True

    async def emit(self, job: Manifest, event: Event) -> None:
        """Has an event about the job sent, in the background. Never raises."""
        self._recorder.emit(job, event)

    async def flush(self) -> None:
        """Returns once all events are sent, or after a few seconds."""
        await self._recorder.flush()

    async def list_jobs(self, namespaces: Sequence[str] = ()) -> AsyncIterator[Manifest]:
        """All LoRATrainingJobs, of these namespaces or of all. Not part of the port: for the periodic look at everything."""
        for namespace in namespaces or (None,):
            async for job in self._api.pages(path(API_VERSION, PLURAL, namespace)):
                yield job

    async def missing_resources(self) -> frozenset[str]:
        """Which of our resources the server does not serve: empty once the CRDs are installed."""
        found = await self._api.get(f"/apis/{API_VERSION}")
        served = {resource["name"] for resource in (found or {}).get("resources", ())}
        return frozenset({PLURAL, PROFILE_PLURAL}) - served


def _labelled(uid: str) -> dict[str, str]:
    return {"labelSelector": f"{LABEL_JOB_UID}={uid}", **_FROM_CACHE}


def _said_at(event: Manifest) -> str:
    """When an event was last said, RFC 3339 and so comparable as text to the second."""
    series = event.get("series") or {}
    moments = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((str(moment)[:19] for moment in moments if moment), "")


def _goes_with(companion: Manifest, job: Manifest | None) -> bool:
    """Whether a Service or ConfigMap belongs to the child Job, which may be gone already."""
    labels = companion["metadata"].get("labels") or {}
    if labels.get(LABEL_MANAGED_BY) != MANAGED_BY or LABEL_JOB_UID not in labels:
        return False
    return job is None or labels[LABEL_JOB_UID] == (job["metadata"].get("labels") or {}).get(LABEL_JOB_UID)
