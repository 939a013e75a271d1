"""`LoRATrainingProfile`: what the platform team decides, cluster-scoped."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lora_api.base import Kubernetes
from lora_api.job import _NAME_PATTERN, _PATH_PATTERN, CPU_PATTERN, MEMORY_PATTERN, ObjectMeta

PROFILE_KIND = "LoRATrainingProfile"
PROFILE_PLURAL = "loratrainingprofiles"

Name = Annotated[str, Field(pattern=_NAME_PATTERN, max_length=253)]


class CredentialsSpec(Kubernetes):
    """Secrets with the keys `accessKey` and `secretKey`."""

    operator_secret_name: Name | None = Field(None, description="Secret in the operator's namespace, for the operator.")
    job_secret_name: Name | None = Field(None, description="Secret in each job's namespace, mounted into the trainer.")


class StoreSpec(Kubernetes):
    """One store of run directories."""

    name: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=63)] = Field(
        description="What `spec.output.store` names."
    )
    type: Literal["s3", "directory"] = Field("s3", description="An S3 server, or a directory (without a cluster only).")
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$", max_length=512)] | None = Field(
        None, description="S3: URL of the server, such as https://minio.storage.svc:9000."
    )
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] | None = Field(
        None, description="S3: the bucket."
    )
    prefix: Annotated[str, Field(pattern=rf"(^$)|({_PATH_PATTERN})", max_length=512)] = Field(
        "", description="Prefix in front of every run directory."
    )
    region: Annotated[str, Field(max_length=64)] = Field("us-east-1", description="S3: region.")
    directory: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Directory: absolute path.")
    credentials: CredentialsSpec = Field(CredentialsSpec(), description="S3: secrets.")

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> StoreSpec:
        needed = ("endpoint", "bucket") if self.type == "s3" else ("directory",)
        for field in needed:
            if getattr(self, field) is None:
                raise ValueError(f"{field}: required for a store of type {self.type}")
        return self


class Toleration(Kubernetes):
    """A toleration, as in a pod."""

    key: Annotated[str, Field(max_length=317)] | None = Field(
        None, description="Taint key; left out with operator Exists: every taint."
    )
    operator: Literal["Exists", "Equal"] | None = Field(None, description="How key and value are compared.")
    value: Annotated[str, Field(max_length=63)] | None = Field(None, description="Taint value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Taint effect; left out: every effect."
    )
    toleration_seconds: int | None = Field(
        None, description="How long a NoExecute taint is tolerated; left out: for ever."
    )


class TrainerSpec(Kubernetes):
    """The trainer's image and pod."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] = Field(description="Trainer image.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="Pull policy.")
    image_pull_secrets: tuple[Name, ...] = Field((), max_length=16, description="Pull secrets in the job's namespace.")
    service_account_name: Name = Field("default", description="Service account of the trainer pods; gets no API token.")
    node_selector: dict[str, str] = Field({}, description="Node selector of the trainer pods.")
    tolerations: tuple[Toleration, ...] = Field((), max_length=32, description="Tolerations of the trainer pods.")
    termination_grace_period_seconds: int = Field(
        120, ge=5, le=86400, description="Least grace period; raised when the measured save time needs more."
    )
    shared_memory: str = Field(
        "1Gi", pattern=r"^[0-9]+(Ki|Mi|Gi)$", max_length=32, description="Size of the memory-backed /dev/shm."
    )
    gpu_resource_name: str = Field("nvidia.com/gpu", max_length=253, description="Extended resource of a GPU.")
    env: dict[str, str] = Field({}, description="Environment variables of the trainer. Not for credentials.")


class SizingSpec(Kubernetes):
    """What a job that doesn't say gets."""

    nodes: int = Field(1, ge=1, le=64, description="Pods.")
    gpus_per_node: int = Field(1, ge=0, le=16, description="GPUs in each pod.")
    cpu: str = Field("4", pattern=CPU_PATTERN, max_length=32, description="CPU request of each pod.")
    memory: str = Field(
        "32Gi", pattern=MEMORY_PATTERN, max_length=32, description="Memory request and limit of each pod."
    )


class BackoffSpec(Kubernetes):
    """Waiting time before the n-th retry of a failure: initial x 2^(n-1), at most the maximum."""

    initial_seconds: int = Field(10, ge=0, le=3600, description="Before the first retry.")
    max_seconds: int = Field(360, ge=0, le=86400, description="At most.")


class ProfileSpec(Kubernetes):
    """What the platform team decides."""

    stores: tuple[StoreSpec, ...] = Field(min_length=1, max_length=32, description="Stores that jobs may name.")
    trainer: TrainerSpec = Field(description="Trainer image and pod.")
    sizing: SizingSpec = Field(SizingSpec(), description="Default resources.")
    backoff: BackoffSpec = Field(BackoffSpec(), description="Waiting time between failures.")

    @model_validator(mode="after")
    def _store_names_differ(self) -> ProfileSpec:
        names = [store.name for store in self.stores]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"stores: the name {twice[0]!r} is there twice")
        return self

    def store(self, name: str) -> StoreSpec | None:
        """The store of that name, if there is one."""
        return next((store for store in self.stores if store.name == name), None)


class LoRATrainingProfile(Kubernetes):
    """A profile manifest or object."""

    api_version: Literal["lora-operator.io/v1alpha1"]
    kind: Literal["LoRATrainingProfile"]
    metadata: ObjectMeta
    spec: ProfileSpec
