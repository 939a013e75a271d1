"""The documents that operator and trainer leave for each other: the run configuration and the run directory's JSON.

Writers are named in each docstring. All times are RFC 3339 in UTC; all steps count optimizer updates done.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field

from lora_api.base import Document
from lora_api.config import MUTABLE_CONFIG_PATHS, TrainerConfig
from lora_api.order import without_its_end
from lora_api.profile import StoreSpec

Stage = Literal["Initializing", "PreparingData", "Training", "Finalizing"]


class RunConfig(Document):
    """Handed to the trainer as a file (`run.json` of a ConfigMap); written by the operator, once per attempt."""

    job_name: str
    namespace: str
    uid: str
    attempt: int
    config: TrainerConfig
    store: StoreSpec
    path: str  # prefix of the run directory inside the store, without the store's own prefix
    if_exists: Literal["Refuse", "Continue"] = "Refuse"
    nodes: int = 1
    processes_per_node: int = 1
    shrunk: int = 0  # how often the run was made smaller because memory ran out, see `lora_api.shrink`
    stores: tuple[StoreSpec, ...] = ()  # the profile's stores, to resolve s3:// locations of models and datasets


class RunFile(Document):
    """`run.json`: whose directory this is. Written by the trainer's first start."""

    uid: str
    job_name: str
    namespace: str
    config_hash: str
    created_at: str


class StartClaim(Document):
    """`starts/000001.json`: one claim per start, the highest wins. Written by rank 0."""

    start: int
    attempt: int
    token: str  # random; tells two claimants of one number apart
    claimed_at: str
    host: str = ""


class RejectedCheckpoint(Document):
    """A committed checkpoint that failed its integrity check at resume."""

    key: str  # of its manifest
    step: int
    reason: str


class ExitWord(Document):
    """How a start ended: one JSON line in the termination log, and the same in `progress.json`."""

    code: int  # see exit_codes; any other non-zero code is a plain failure
    reason: str  # CamelCase
    message: str  # a sentence; names the field or file for configuration and data errors
    step: int = 0  # updates done and committed when it ended
    shrink_helps: bool = True  # out of memory only: it was training steps that had no room


class Progress(Document):
    """`progress.json`: the heartbeat of rank 0, every few seconds, and once more at the end of a start."""

    start: int
    attempt: int
    stage: Stage
    step: int
    steps: int
    loss: float | None = None  # exponentially smoothed; None before the first step
    learning_rate: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    eta_seconds: float | None = None
    resumed_from_step: int | None = None  # None: began at step 0
    lost_steps: int = 0  # over all starts: steps that were done before and had to be done again
    save_seconds: float | None = None  # longest checkpoint save so far: the grace period must cover it
    rejected: tuple[RejectedCheckpoint, ...] = ()
    nonfinite_steps: int = 0  # skipped, over this start
    detail: str = ""  # what is being done, for people: "encoding 5/12 pictures"
    updated_at: str
    advanced_at: str | None = None  # last sign of progress: stands still while training hangs
    exit: ExitWord | None = None


class Control(Document):
    """`control.json`: runtime parameters, written by the operator only; taken over at the next step."""

    generation: int
    steps: int
    lr: float
    save_every: int
    max_step_saves: int
    sample: dict[str, Any] = {}
    save: dict[str, Any] = {}  # the whole block; older writers leave it out


class FileEntry(Document):
    """One file of a checkpoint or of the final folder. `name` is relative to the manifest's folder."""

    name: str
    size_bytes: int
    sha256: str


class CheckpointManifest(Document):
    """`checkpoints/step-000000900/000001/manifest.json`: THE COMMIT, written last by rank 0."""

    step: int
    start: int
    attempt: int
    uid: str
    config_hash: str
    committed_at: str
    files: tuple[FileEntry, ...]
    save_seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size_bytes for file in self.files)


class FinalManifest(Document):
    """`final/manifest.json`: the job has succeeded. Written last by rank 0."""

    step: int
    start: int
    uid: str
    config_hash: str
    completed_at: str
    adapter: str  # name of the adapter file in final/
    samples: tuple[str, ...] = ()  # names in final/
    files: tuple[FileEntry, ...] = Field(default=())

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size_bytes for file in self.files)


def config_hash(config: TrainerConfig) -> str:
    """Sixteen hex digits over what defines the run: the configuration without its mutable paths.

    Defaults are left out, so that a field which a newer version adds does not part running jobs from their checkpoints.
    """
    wire = config.model_dump(mode="json", exclude_defaults=True)
    if "train" in wire:
        wire["train"] = without_its_end(wire["train"])
    for path in MUTABLE_CONFIG_PATHS:
        parent = wire
        for key in path[:-1]:
            parent = parent.get(key, {})
        parent.pop(path[-1], None)
    # where to train, how processes share it and how often to log do not change what is trained
    for key in ("device", "performance_log_every"):
        wire.pop(key, None)
    wire.get("train", {}).pop("parallelism", None)
    wire = {key: value for key, value in wire.items() if value != {}}  # a block in which only mutable fields were set
    text = json.dumps(wire, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
