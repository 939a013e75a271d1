"""Child objects of an attempt: ConfigMap, headless Service, Indexed Job. Pure: the job and its profile in, plain data out."""

from __future__ import annotations

import math
from typing import Any

from lora_api import names
from lora_api.exit_codes import ExitCode
from lora_api.job import API_VERSION, KIND, LoRATrainingJob
from lora_api.profile import LoRATrainingProfile, StoreSpec, TrainerSpec
from lora_api.run import Progress, RunConfig
from lora_operator.core.views import Manifest

RUN_CONFIG_FILE = "run.json"
RUN_CONFIG_FOLDER = "/etc/lora-run"
CREDENTIALS_FOLDER = "/etc/lora-credentials"
CACHE_FOLDER = "/cache"
TERMINATION_LOG = "/dev/termination-log"
MASTER_PORT = 29500
METRICS_PORT = 9400
_USER = 65532
_TOLD_CODES = sorted(code for code in ExitCode if code not in (ExitCode.DONE, ExitCode.TRANSIENT))


def build_attempt(
    job: LoRATrainingJob,
    profile: LoRATrainingProfile,
    store: StoreSpec,
    attempt: int,
    *,
    last: Progress | None = None,
    shrunk: int = 0,
) -> tuple[Manifest, ...]:
    """ConfigMap, Service and Job of an attempt, in the order in which they are created.

    Args:
        job: The job; its uid becomes the owner reference.
        profile: Images, sizing, pod defaults.
        store: The store that `job.spec.output.store` names.
        attempt: Counts from 1.
        last: The newest heartbeat, whose save time sets the grace period.
        shrunk: How often the run was made smaller because memory ran out.
    """
    run_config = _run_config(job, profile, store, attempt, shrunk)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, attempt),
        "data": {RUN_CONFIG_FILE: run_config.model_dump_json(by_alias=True, indent=1)},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, attempt),
        "spec": {
            "clusterIP": "None",
            "selector": _selector(job, attempt),
            "publishNotReadyAddresses": True,  # ranks look for each other before they are ready
            "ports": [
                {"name": "rendezvous", "port": MASTER_PORT},
                {"name": "metrics", "port": METRICS_PORT},
            ],
        },
    }
    pod_spec = _pod_spec(job, profile, store, run_config, last)
    return config_map, service, _batch_job(job, _metadata(job, attempt), run_config.nodes, pod_spec)


def grace_seconds(profile: LoRATrainingProfile, last: Progress | None) -> int:
    """Seconds from SIGTERM to SIGKILL: the profile's, or three times the longest save so far and half a minute."""
    measured = last.save_seconds if last and last.save_seconds else 0.0
    return max(profile.spec.trainer.termination_grace_period_seconds, math.ceil(3 * measured) + 30)


def sizing(job: LoRATrainingJob, profile: LoRATrainingProfile) -> tuple[int, int, str, str]:
    """(nodes, GPUs per node, CPU, memory), the job's own words first."""
    asked, default = job.spec.resources, profile.spec.sizing
    gpus = default.gpus_per_node if asked.gpus_per_node is None else asked.gpus_per_node
    return asked.nodes or default.nodes, gpus, asked.cpu or default.cpu, asked.memory or default.memory


def _selector(job: LoRATrainingJob, attempt: int) -> dict[str, str]:
    return {names.LABEL_JOB_UID: job.metadata.uid, names.LABEL_ATTEMPT: str(attempt)}


def _metadata(job: LoRATrainingJob, attempt: int) -> dict[str, Any]:
    return {
        "name": names.child_name(job.metadata.name, attempt),
        "namespace": job.metadata.namespace,
        "labels": {
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            names.LABEL_JOB: names.label_value(job.metadata.name),
            **_selector(job, attempt),
        },
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.metadata.name,
                "uid": job.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _run_config(
    job: LoRATrainingJob, profile: LoRATrainingProfile, store: StoreSpec, attempt: int, shrunk: int
) -> RunConfig:
    nodes, gpus, _, _ = sizing(job, profile)
    return RunConfig(
        job_name=job.metadata.name,
        namespace=job.metadata.namespace,
        uid=job.metadata.uid,
        attempt=attempt,
        config=job.spec.config,
        store=store,
        path=job.output_path,
        if_exists=job.spec.output.if_exists,
        nodes=nodes,
        processes_per_node=max(1, gpus),
        shrunk=shrunk,
        stores=profile.spec.stores,
    )


def _batch_job(job: LoRATrainingJob, metadata: dict[str, Any], nodes: int, pod_spec: dict[str, Any]) -> Manifest:
    labels = dict(metadata["labels"])
    if job.spec.run_policy.queue_name:
        metadata = {**metadata, "labels": {**labels, "kueue.x-k8s.io/queue-name": job.spec.run_policy.queue_name}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,  # restarts are the operator's: a new attempt, never a lone new pod
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {  # so that the Job remembers why, when its pods are gone
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": names.TRAINER_CONTAINER,
                            "operator": "In",
                            "values": [int(code) for code in _TOLD_CODES],
                        },
                    },
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": pod_spec,
            },
        },
    }


def _pod_spec(
    job: LoRATrainingJob, profile: LoRATrainingProfile, store: StoreSpec, run_config: RunConfig, last: Progress | None
) -> dict[str, Any]:
    trainer = profile.spec.trainer
    name = names.child_name(job.metadata.name, run_config.attempt)
    grace = grace_seconds(profile, last)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "serviceAccountName": trainer.service_account_name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, profile, run_config, name, grace)],
        "volumes": _volumes(name, trainer.shared_memory, store),
    }
    if trainer.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in trainer.image_pull_secrets]
    if trainer.node_selector:
        spec["nodeSelector"] = dict(trainer.node_selector)
    if trainer.tolerations:
        spec["tolerations"] = [
            toleration.model_dump(by_alias=True, exclude_none=True) for toleration in trainer.tolerations
        ]
    if job.spec.run_policy.priority_class_name:
        spec["priorityClassName"] = job.spec.run_policy.priority_class_name
    return spec


def _container(
    job: LoRATrainingJob, profile: LoRATrainingProfile, run_config: RunConfig, name: str, grace: int
) -> dict[str, Any]:
    trainer = profile.spec.trainer
    _, gpus, cpu, memory = sizing(job, profile)
    requests: dict[str, Any] = {"cpu": cpu, "memory": memory}
    limits: dict[str, Any] = {"memory": memory}
    if gpus:
        requests[trainer.gpu_resource_name] = limits[trainer.gpu_resource_name] = gpus
    return {
        "name": names.TRAINER_CONTAINER,
        "image": trainer.image,
        "imagePullPolicy": trainer.image_pull_policy,
        "command": _command(run_config, name),
        "env": [{"name": key, "value": value} for key, value in _environment(trainer, grace).items()],
        "ports": [
            {"name": "rendezvous", "containerPort": MASTER_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_CONFIG_FOLDER, "readOnly": True},
            {"name": "credentials", "mountPath": CREDENTIALS_FOLDER, "readOnly": True},
            {"name": "cache", "mountPath": CACHE_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - an emptyDir
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - an emptyDir in memory
        ],
    }


def _environment(trainer: TrainerSpec, grace: int) -> dict[str, str]:
    return {
        "LORA_RUN_CONFIG": f"{RUN_CONFIG_FOLDER}/{RUN_CONFIG_FILE}",
        "LORA_CREDENTIALS_DIR": CREDENTIALS_FOLDER,
        "LORA_CACHE_DIR": CACHE_FOLDER,
        "LORA_TERMINATION_LOG": TERMINATION_LOG,
        "LORA_GRACE_SECONDS": str(grace - 2),
        "LORA_METRICS_PORT": str(METRICS_PORT),
        "HOME": "/tmp",  # noqa: S108 - an emptyDir; the root file system is read-only
        "HF_HUB_OFFLINE": "1",
        **trainer.env,
    }


def _command(run_config: RunConfig, name: str) -> list[str]:
    """Torchrun in exec form: no shell between the kubelet's SIGTERM and the ranks."""
    master = "127.0.0.1" if run_config.nodes == 1 else f"{name}-0.{name}"
    return [
        "python3",
        "-m",
        "lora_trainer.launch",
        f"--nnodes={run_config.nodes}",
        f"--nproc-per-node={run_config.processes_per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={master}",
        f"--master-port={MASTER_PORT}",
        "-m",
        "lora_trainer",
        "train",
    ]


def _volumes(name: str, shared_memory: str, store: StoreSpec) -> list[dict[str, Any]]:
    secret = store.credentials.job_secret_name
    credentials: dict[str, Any] = (
        {"secret": {"secretName": secret, "defaultMode": 0o440}} if secret else {"emptyDir": {}}
    )
    return [
        {"name": "run", "configMap": {"name": name}},
        {"name": "credentials", **credentials},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
    ]
