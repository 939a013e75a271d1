"""An API server in memory behind the port of `lora_operator.ports`; held to the same suite as the real adapter.

Tests play the other actors: `apply` is the user, `set_status` the kubelet and the Job controller, `vanish` whoever
deletes by force. `fail` makes the next calls of a method raise.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from lora_api.job import KIND
from lora_api.names import LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY
from lora_api.profile import PROFILE_KIND
from lora_operator.core.views import Event, JobKey, Manifest
from lora_operator.ports import ClusterError, RefusedError

Place = tuple[str, str, str]  # kind, namespace, name

_NOW = "2026-01-01T00:00:00Z"
_CREATED_BY_OPERATOR = ("Job", "Service", "ConfigMap")


@dataclass
class FakeCluster:
    """See the module. Objects that cross its border are copies: nobody changes what is stored by holding it."""

    objects: dict[Place, Manifest] = field(default_factory=dict)
    events: list[tuple[JobKey, Event]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)  # kind -> message with which `create` refuses it
    _failures: dict[str, list[Exception]] = field(default_factory=lambda: defaultdict(list))
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _uids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    # --- what the other actors do

    def apply(self, manifest: Manifest) -> Manifest:
        """Creates an object, or replaces its spec and labels as `kubectl apply` would; the status stays the server's."""
        place = _place(manifest)
        known = self.objects.get(place)
        if known is None:
            return self._insert(manifest)
        new = copy.deepcopy(known)
        new["metadata"]["labels"] = copy.deepcopy(manifest["metadata"].get("labels", {}))
        if new.get("spec") != manifest.get("spec"):
            new["spec"] = copy.deepcopy(manifest.get("spec"))
            new["metadata"]["generation"] += 1
        return self._store(place, new)

    def set_status(self, kind: str, namespace: str, name: str, status: Manifest) -> Manifest:
        """Replaces an object's status, as a controller or kubelet does."""
        place = (kind, namespace, name)
        return self._store(place, {**self.objects[place], "status": copy.deepcopy(status)})

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Deletes as a user does: an object with finalizers stays, marked; children of a gone owner go with it."""
        place = (kind, namespace, name)
        stored = self.objects.get(place)
        if stored is None:
            return
        if not stored["metadata"].get("finalizers"):
            self.vanish(kind, namespace, name)
        elif "deletionTimestamp" not in stored["metadata"]:
            marked = {
                **stored["metadata"],
                "deletionTimestamp": _NOW,
                "generation": stored["metadata"]["generation"] + 1,
            }
            self._store(place, {**stored, "metadata": marked})

    def vanish(self, kind: str, namespace: str, name: str) -> None:
        """The object is gone, and what it owned, except for pods: those are marked and end when a test says so."""
        gone = self.objects.pop((kind, namespace, name), None)
        if gone is None:
            return
        for place, owned in list(self.objects.items()):
            owners = owned["metadata"].get("ownerReferences") or ()
            if not any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                continue
            if place[0] == "Pod":
                self._store(place, {**owned, "metadata": {**owned["metadata"], "deletionTimestamp": _NOW}})
            else:
                self.vanish(*place)

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """A copy of a stored object."""
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    def of_kind(self, kind: str) -> list[Manifest]:
        """Copies of all objects of a kind."""
        return [copy.deepcopy(stored) for place, stored in self.objects.items() if place[0] == kind]

    def fail(self, method: str, *errors: Exception) -> None:
        """The next calls of a method raise these."""
        self._failures[method].extend(errors or (ClusterError("the API server is away"),))

    # --- the port

    async def read_job(self, key: JobKey) -> Manifest | None:
        self._called("read_job")
        return self.get(KIND, key.namespace, key.name)

    async def read_profile(self, name: str) -> Manifest | None:
        self._called("read_profile")
        return self.get(PROFILE_KIND, "", name)

    async def secret_keys(self, namespace: str, name: str) -> frozenset[str] | None:
        self._called("secret_keys")
        secret = self.get("Secret", namespace, name)
        return None if secret is None else frozenset(secret.get("data") or {})

    async def read_secret(self, namespace: str, name: str) -> dict[str, bytes] | None:
        self._called("read_secret")
        secret = self.get("Secret", namespace, name)
        return None if secret is None else {key: base64.b64decode(text) for key, text in secret["data"].items()}

    async def read_children(self, key: JobKey, uid: str) -> list[Manifest]:
        self._called("read_children")
        return self._labelled("Job", key.namespace, uid)

    async def read_child(self, namespace: str, name: str) -> Manifest | None:
        self._called("read_child")
        return self.get("Job", namespace, name)

    async def read_pods(self, key: JobKey, uid: str) -> list[Manifest]:
        self._called("read_pods")
        return self._labelled("Pod", key.namespace, uid)

    async def read_warnings(self, namespace: str, pod_names: list[str]) -> list[str]:
        self._called("read_warnings")
        texts = []
        for name in pod_names:
            about = [
                event
                for event in self.of_kind("Event")
                if event["metadata"]["namespace"] == namespace
                and event["involvedObject"]["name"] == name
                and event["type"] == "Warning"
            ]
            if about:
                newest = max(about, key=lambda event: str(event["lastTimestamp"]))
                texts.append(f"{newest['reason']}: {newest['message']}")
        return texts

    async def create(self, manifest: Manifest) -> bool:
        self._called("create")
        assert manifest["kind"] in _CREATED_BY_OPERATOR, manifest["kind"]
        if manifest["kind"] in self.refusals:
            raise RefusedError(self.refusals[manifest["kind"]])
        if _place(manifest) in self.objects:
            return False
        self._insert(manifest)
        return True

    async def delete_child(self, namespace: str, name: str, uid: str) -> None:
        self._called("delete_child")
        job = self.get("Job", namespace, name)
        if job is not None and job["metadata"]["uid"] != uid:
            return
        for kind in ("Job", "Service", "ConfigMap"):
            stored = self.get(kind, namespace, name)
            if stored is not None and (kind == "Job" or _goes_with(stored, job)):
                self.vanish(kind, namespace, name)

    async def write_status(self, job: Manifest, status: Manifest) -> bool:
        self._called("write_status")
        stored = self._as_read(job)
        if stored is None:
            return False
        self._store(_place(job), {**stored, "status": json.loads(json.dumps(status))})
        return True

    async def write_finalizers(self, job: Manifest, finalizers: tuple[str, ...]) -> bool:
        self._called("write_finalizers")
        stored = self._as_read(job)
        if stored is None:
            return False
        metadata = {**stored["metadata"], "finalizers": list(finalizers)}
        self._store(_place(job), {**stored, "metadata": metadata})
        if not finalizers and "deletionTimestamp" in metadata:
            self.vanish(*_place(job))
        return True

    async def emit(self, job: Manifest, event: Event) -> None:
        self.calls["emit"] += 1
        self.events.append((JobKey(job["metadata"]["namespace"], job["metadata"]["name"]), event))

    async def list_jobs(self, namespaces: Sequence[str] = ()) -> AsyncIterator[Manifest]:
        self._called("list_jobs")
        for job in self.of_kind(KIND):
            if not namespaces or job["metadata"]["namespace"] in namespaces:
                yield job

    # --- the server

    def _called(self, method: str) -> None:
        self.calls[method] += 1
        if self._failures[method]:
            raise self._failures[method].pop(0)

    def _insert(self, manifest: Manifest) -> Manifest:
        new = json.loads(json.dumps(manifest))  # as over the wire: no tuples, nothing shared
        metadata = new["metadata"]
        metadata.update(uid=f"00000000-0000-0000-0000-{next(self._uids):012d}", generation=1, creationTimestamp=_NOW)
        if new["kind"] == "Secret":
            texts = new.pop("stringData", {})
            new["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        return self._store(_place(new), new)

    def _store(self, place: Place, new: Manifest) -> Manifest:
        stored = copy.deepcopy(new)
        stored["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[place] = stored
        return copy.deepcopy(stored)

    def _as_read(self, job: Manifest) -> Manifest | None:
        """The stored job if nobody has written it since it was read."""
        stored = self.objects.get(_place(job))
        same = stored is not None and all(
            stored["metadata"][key] == job["metadata"][key] for key in ("uid", "resourceVersion")
        )
        return stored if same else None

    def _labelled(self, kind: str, namespace: str, uid: str) -> list[Manifest]:
        return [
            stored
            for stored in self.of_kind(kind)
            if stored["metadata"]["namespace"] == namespace
            and (stored["metadata"].get("labels") or {}).get(LABEL_JOB_UID) == uid
        ]


def _place(manifest: Manifest) -> Place:
    return manifest["kind"], manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]


def _goes_with(companion: Manifest, job: Manifest | None) -> bool:
    labels = companion["metadata"].get("labels") or {}
    if labels.get(LABEL_MANAGED_BY) != MANAGED_BY or LABEL_JOB_UID not in labels:
        return False
    return job is None or labels[LABEL_JOB_UID] == (job["metadata"].get("labels") or {}).get(LABEL_JOB_UID)
