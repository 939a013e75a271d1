"""Small legal objects for tests of the cluster port."""

from __future__ import annotations

from typing import Any

from lora_api import names
from lora_api.job import API_VERSION, KIND
from lora_operator.core.views import JobKey, Manifest

NAMESPACE = "team-a"


def a_job(name: str = "mascot", namespace: str = NAMESPACE, **spec: Any) -> Manifest:
    """A LoRATrainingJob as a user applies it."""
    config = {
        "type": "diffusion_trainer",
        "device": "cpu",
        "model": {"arch": "flux2_klein_4b", "name_or_path": "/models/tiny"},
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "datasets": [{"folder_path": "/data/set", "resolution": [64]}],
        "train": {"steps": 10, "train_unet": True},
        "save": {"save_every": 5, "max_step_saves": 2},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"config": config, **spec},
    }


def a_profile(name: str = "default", **store: Any) -> Manifest:
    """A LoRATrainingProfile with one store."""
    return {
        "apiVersion": API_VERSION,
        "kind": "LoRATrainingProfile",
        "metadata": {"name": name},
        "spec": {
            "stores": [
                {
                    "name": "default",
                    "endpoint": "http://127.0.0.1:9000",
                    "bucket": "lora",
                    "credentials": {"operatorSecretName": "store", "jobSecretName": "store"},
                    **store,
                }
            ],
            "trainer": {"image": "lora-trainer:test"},
            "sizing": {"nodes": 1, "gpusPerNode": 0, "cpu": "100m", "memory": "128Mi"},
        },
    }


def a_secret(name: str = "store", namespace: str = NAMESPACE, **values: str) -> Manifest:
    """A Secret with the keys of a store, or with other ones."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": values or {"accessKey": "key", "secretKey": "secret"},
    }


def labels_of(uid: str, attempt: int = 1, name: str = "mascot") -> dict[str, str]:
    """What the operator writes on children."""
    return {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_JOB: name,
        names.LABEL_JOB_UID: uid,
        names.LABEL_ATTEMPT: str(attempt),
    }


def a_child(name: str = "mascot-1", uid: str = "uid-1", namespace: str = NAMESPACE) -> Manifest:
    """A batch/v1 Job of an attempt; suspended, so that no controller makes pods of it."""
    container = {"name": names.TRAINER_CONTAINER, "image": "lora-trainer:test"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "labels": labels_of(uid)},
        "spec": {
            "suspend": True,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
        },
    }


def a_companion(kind: str, name: str = "mascot-1", uid: str = "uid-1", namespace: str = NAMESPACE) -> Manifest:
    """The Service or ConfigMap of an attempt."""
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "labels": labels_of(uid)},
    }
    if kind == "Service":
        manifest["spec"] = {"clusterIP": "None", "selector": labels_of(uid), "ports": [{"name": "x", "port": 29500}]}
    return manifest


def a_pod(name: str, uid: str = "uid-1", attempt: int = 1, namespace: str = NAMESPACE) -> Manifest:
    """A pod of an attempt."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels_of(uid, attempt)},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": names.TRAINER_CONTAINER, "image": "lora-trainer:test"}],
        },
    }


def a_warning(pod: str, reason: str, message: str, at: str, namespace: str = NAMESPACE) -> Manifest:
    """A warning event about a pod, as the kubelet writes it."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod}.{reason.lower()}", "namespace": namespace},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": pod, "namespace": namespace},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def key_of(manifest: Manifest) -> JobKey:
    """The key of a job."""
    return JobKey(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
