"""The outside world as the reconciler sees it. Kubernetes and the local engine implement the same port.

Objects cross the port as plain Kubernetes manifests, so that both sides of it speak of the same things and the
reconciler can't tell a cluster from a folder of processes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from lora_api.profile import StoreSpec
from lora_api.store import Store
from lora_operator.core.views import Event, JobKey, Manifest


class ClusterError(Exception):
    """The API server could not be asked; trying again may help."""


class RefusedError(ClusterError):
    """The API server understood and refused (invalid, forbidden, quota); the message is its own."""


class Cluster(Protocol):
    """Reads are current or slightly old; every write says what it was based on."""

    async def read_job(self, key: JobKey) -> Manifest | None:
        """The LoRATrainingJob; None when it is gone."""
        ...

    async def read_profile(self, name: str) -> Manifest | None:
        """The LoRATrainingProfile; None when there is none of that name."""
        ...

    async def secret_keys(self, namespace: str, name: str) -> frozenset[str] | None:
        """The keys of a Secret in a job's namespace, without its values; None when there is none."""
        ...

    async def read_children(self, key: JobKey, uid: str) -> list[Manifest]:
        """All batch/v1 Jobs labelled with the job's uid (`names.LABEL_JOB_UID`)."""
        ...

    async def read_child(self, namespace: str, name: str) -> Manifest | None:
        """The batch/v1 Job of that name, whoever owns it."""
        ...

    async def read_pods(self, key: JobKey, uid: str) -> list[Manifest]:
        """All pods labelled with the job's uid, of every attempt."""
        ...

    async def read_warnings(self, namespace: str, pod_names: list[str]) -> list[str]:
        """Newest warning event text of each of these pods, such as FailedMount or FailedScheduling."""
        ...

    async def create(self, manifest: Manifest) -> bool:
        """Creates the object; False when one of that name is there already. Raises RefusedError."""
        ...

    async def delete_child(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the Job (only if it has this uid), its pods with their grace period, its Service and ConfigMap."""
        ...

    async def write_status(self, job: Manifest, status: Manifest) -> bool:
        """Replaces the status if the job still has `job`'s resourceVersion; False on a conflict or when it is gone."""
        ...

    async def write_finalizers(self, job: Manifest, finalizers: tuple[str, ...]) -> bool:
        """Replaces the finalizers if the job still has `job`'s resourceVersion; False on a conflict or when gone."""
        ...

    async def emit(self, job: Manifest, event: Event) -> None:
        """Sends an event about the job. Never raises: an event is news, not state."""
        ...


class Stores(Protocol):
    """Opens stores with the operator's own credentials."""

    async def open(self, spec: StoreSpec) -> Store:
        """The store. Raises StoreError (credentials missing or refused included)."""
        ...


class Clock(Protocol):
    """The time."""

    def now(self) -> datetime:
        """The current time, in UTC."""
        ...
