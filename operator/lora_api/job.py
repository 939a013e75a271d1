"""`LoRATrainingJob`: one base model, one adapter, one run directory."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from lora_api.base import Kubernetes
from lora_api.config import TrainerConfig

GROUP = "lora-operator.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LoRATrainingJob"
PLURAL = "loratrainingjobs"
FINALIZER = f"{GROUP}/run-directory"

_PATH_PATTERN = r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"
_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
CPU_PATTERN = r"^[0-9]+(\.[0-9]+)?m?$"
MEMORY_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"


def _no_dot_segments(path: str) -> str:
    if any(set(segment) == {"."} for segment in path.split("/")):
        raise ValueError(f"{path!r} has a segment of dots only")
    return path


class Phase(StrEnum):
    """For people only; programs read the conditions."""

    PENDING = "Pending"
    QUEUED = "Queued"
    RUNNING = "Running"
    INTERRUPTED = "Interrupted"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INVALID = "Invalid"
    DELETING = "Deleting"


class OutputSpec(Kubernetes):
    """Where the run directory lies."""

    store: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=63)] = Field(
        "default", description="Name of a store in the profile."
    )
    path: Annotated[str, Field(pattern=_PATH_PATTERN, max_length=512), AfterValidator(_no_dot_segments)] | None = Field(
        None, description="Prefix of the run directory inside the store. Left out: NAMESPACE/NAME."
    )
    if_exists: Literal["Refuse", "Continue"] = Field(
        "Refuse",
        description="What to do when the run directory belongs to another job: refuse, or continue from its newest checkpoint.",
    )
    deletion_policy: Literal["Retain", "Delete"] = Field(
        "Retain", description="Whether deleting the job deletes its run directory."
    )


class ResourcesSpec(Kubernetes):
    """Pods and devices. What is left out is taken from the profile."""

    nodes: int | None = Field(None, ge=1, le=64, description="Pods of the process group.")
    gpus_per_node: int | None = Field(
        None, ge=0, le=16, description="GPUs, and processes, in each pod; 0 trains on the CPU."
    )
    cpu: Annotated[str, Field(pattern=CPU_PATTERN, max_length=32)] | None = Field(
        None, description="CPU request of each pod."
    )
    memory: Annotated[str, Field(pattern=MEMORY_PATTERN, max_length=32)] | None = Field(
        None, description="Memory request and limit of each pod."
    )


class RunPolicy(Kubernetes):
    """How the job is run. All of it may change at any time."""

    suspend: bool = Field(False, description="Save, stop and free the devices until set to false again.")
    queue_name: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=63)] | None = Field(
        None, description="Kueue LocalQueue that admits the job."
    )
    priority_class_name: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=253)] | None = Field(
        None, description="PriorityClass of the pods."
    )
    backoff_limit: int = Field(3, ge=0, le=1000, description="Failures that are retried before the job fails.")
    oom_policy: Literal["Shrink", "Retry", "Fail"] = Field(
        "Shrink",
        description="What follows when device memory runs out: `Shrink` trains the same samples in smaller micro-batches, "
        "then with gradient checkpointing, then fails; `Retry` tries again as it is, up to `backoffLimit`; `Fail` fails.",
    )
    stall_timeout_seconds: int = Field(
        600,
        ge=0,
        le=86400,
        description="Seconds without progress before the attempt is restarted: no step, part of a step or sample done while it trains, "
        "no heartbeat at other times; 0 never.",
    )
    startup_deadline_seconds: int = Field(
        0,
        ge=0,
        le=2_592_000,
        description="Seconds an attempt may wait for its pods to start before the job fails; 0 for ever.",
    )


class JobSpec(Kubernetes):
    """What is asked for."""

    profile: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=253)] = Field(
        "default", description="Name of the LoRATrainingProfile that the platform team provides."
    )
    config: TrainerConfig = Field(description="The trainer's configuration, in its native snake_case keys.")
    output: OutputSpec = Field(OutputSpec(), description="The run directory.")
    resources: ResourcesSpec = Field(ResourcesSpec(), description="Pods and devices.")
    run_policy: RunPolicy = Field(RunPolicy(), description="Restarts, suspension, queueing.")


class ConditionType(StrEnum):
    """Types in `status.conditions`; the first three are kstatus', the rest ours."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    ACCEPTED = "Accepted"
    QUEUED = "Queued"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    INTERRUPTED = "Interrupted"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CHECKPOINT_GC = "CheckpointGC"


class Condition(Kubernetes):
    """A `metav1.Condition`."""

    type: ConditionType = Field(description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="One CamelCase word.")
    message: Annotated[str, Field(max_length=1024)] = Field("", description="A sentence for people.")
    last_transition_time: str = Field(description="When `status` last flipped, RFC 3339.")
    observed_generation: int | None = Field(None, description="The generation this was decided for.")


class Restarts(Kubernetes):
    """How often the job was restarted, by cause."""

    preemption: int = Field(0, description="Preempted, evicted, drained or deleted, and saved.")
    failure: int = Field(0, description="Failures; these count against `backoffLimit`.")
    out_of_memory: int = Field(0, description="Out of device or host memory.")
    infrastructure: int = Field(0, description="Node lost, or pods gone without a word.")

    @property
    def total(self) -> int:
        """All restarts."""
        return self.preemption + self.failure + self.out_of_memory + self.infrastructure


class ShrunkStatus(Kubernetes):
    """How the job is trained since device memory ran out, see `runPolicy.oomPolicy`. The samples of a step stay the same."""

    times: int = Field(0, ge=0, description="How often it was made smaller. Further attempts keep to that.")
    batch_size: int = Field(1, description="Samples in one forward pass of each process now.")
    gradient_accumulation: int = Field(1, description="Forward passes in one optimizer step now.")
    gradient_checkpointing: bool = Field(False, description="Whether activations are recomputed now.")


class ProgressStatus(Kubernetes):
    """Where training stands, from the trainer's heartbeat."""

    step: int = Field(0, description="Optimizer steps done.")
    steps: int = Field(0, description="Optimizer steps in all.")
    percent: str = Field("0%", description="Share done, for the table.")
    loss: str | None = Field(None, description="Loss, smoothed.")
    learning_rate: str | None = Field(None, description="Learning rate of the last step.")
    steps_per_second: str | None = Field(None, description="Optimizer steps per second.")
    samples_per_second: str | None = Field(None, description="Samples per second over all processes.")
    eta_seconds: int | None = Field(None, description="Seconds to the last step at this speed.")
    eta: str | None = Field(None, description="The same for the table, such as 1h12m.")
    resumed_from_step: int | None = Field(None, description="Step of the checkpoint this start went on from.")
    updated_at: str | None = Field(None, description="Time of the heartbeat, RFC 3339.")


class LedgerEntry(Kubernetes):
    """One committed checkpoint."""

    step: int = Field(description="Updates it has had.")
    start: int = Field(description="The start that wrote it.")
    size_bytes: int = Field(description="Bytes of its files.")
    committed_at: str = Field(description="When it was committed, RFC 3339.")


class CheckpointsStatus(Kubernetes):
    """The ledger: what is committed, where, how big. Bounded: the newest 20 are listed."""

    location: str = Field("", description="Folder of the checkpoints.")
    count: int = Field(0, description="Committed checkpoints that exist.")
    newest_step: int | None = Field(None, description="Step of the newest.")
    removed: int = Field(0, description="Checkpoints that retention removed.")
    entries: tuple[LedgerEntry, ...] = Field((), max_length=20, description="The newest, newest first.")


class OutputStatus(Kubernetes):
    """What came out."""

    location: str = Field("", description="The run directory.")
    adapter: str | None = Field(None, description="The final adapter file.")
    samples: tuple[str, ...] = Field((), max_length=8, description="The first sample pictures.")
    size_bytes: int | None = Field(None, description="Bytes of the final folder.")


class JobStatus(Kubernetes):
    """What is seen. Under 8 kB always."""

    observed_generation: int = Field(0, description="The generation this status was decided for.")
    phase: Phase = Field(Phase.PENDING, description="For people; programs read the conditions.")
    stage: Literal["Initializing", "PreparingData", "Training", "Finalizing"] | None = Field(
        None, description="What the trainer is doing."
    )
    attempt: int = Field(0, description="The current child Job's number.")
    child_name: str | None = Field(None, description="Name of the current child Job.")
    retry_at: str | None = Field(None, description="When a restart that is backing off begins, RFC 3339.")
    restarts: Restarts = Field(Restarts(), description="Restarts by cause.")
    restarts_total: int = Field(0, description="All restarts.")
    fruitless_restarts: int = Field(
        0,
        description="Preemptions and lost nodes in a row with no new checkpoint between them; each but the first waits longer.",
    )
    shrunk: ShrunkStatus | None = Field(None, description="How it is trained since device memory ran out.")
    progress: ProgressStatus | None = Field(None, description="Where training stands.")
    checkpoints: CheckpointsStatus = Field(CheckpointsStatus(), description="Committed checkpoints.")
    lost_steps: int = Field(0, description="Steps that had to be done again after restarts.")
    output: OutputStatus = Field(OutputStatus(), description="What came out.")
    conditions: tuple[Condition, ...] = Field((), max_length=16, description="Conditions, kstatus-compatible.")
    start_time: str | None = Field(None, description="When the first attempt was created, RFC 3339.")
    completion_time: str | None = Field(None, description="When the job ended, RFC 3339.")


class ObjectMeta(Kubernetes):
    """The part of Kubernetes' metadata that is used."""

    model_config = Kubernetes.model_config | {"extra": "ignore"}

    name: str = Field(min_length=1, max_length=253)
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()


class LoRATrainingJob(Kubernetes):
    """A manifest, or an object read from the API server."""

    api_version: Literal["lora-operator.io/v1alpha1"]
    kind: Literal["LoRATrainingJob"]
    metadata: ObjectMeta
    spec: JobSpec
    status: JobStatus | None = None

    @property
    def output_path(self) -> str:
        """Prefix of the run directory inside its store."""
        return self.spec.output.path or f"{self.metadata.namespace}/{self.metadata.name}"


def status_to_wire(status: JobStatus) -> dict[str, Any]:
    """The status as written to the API server: camelCase, without nulls."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def is_legal_name(name: str) -> bool:
    """Whether `name` is a DNS subdomain, as the API server asks of object names."""
    return len(name) <= 253 and _SUBDOMAIN.fullmatch(name) is not None
