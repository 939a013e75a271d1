"""Support for tests of several ranks: real processes under the launcher, on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lora_api import layout
from lora_api.run import CheckpointManifest, RunConfig, config_hash
from tests.trainer.jobs import Job

TWO_RANKS = ["--standalone", "--nproc-per-node=2"]
LAUNCH = [sys.executable, "-m", "lora_trainer.launch", *TWO_RANKS, "-m", "lora_trainer", "train"]


def run_on_two_ranks(job: Job, **variables: str) -> int:
    """Runs one start on two ranks to its end; returns the launcher's exit code. The log is `job.folder / "log"`."""
    environment = job.environment() | variables
    with (job.folder / "log").open("ab") as log:
        return subprocess.run(
            LAUNCH, env=environment, stderr=log, stdout=log, cwd=job.folder, timeout=300, check=False
        ).returncode


def log_of(job: Job) -> str:
    """What all ranks said."""
    return (job.folder / "log").read_text()


def twin(job: Job, name: str, until: int, **changes: Any) -> Job:
    """The same job in a run directory of its own that was interrupted after the checkpoint of step `until`.

    Args:
        job: A finished job.
        name: Of the copy.
        until: Checkpoints of later steps, and the final files, are not there.
        changes: To its configuration; the checkpoint is made to look as if that had been its own all along.
    """
    copy = job.copy(name)
    shutil.copytree(job.folder, copy.folder)
    copy.change(**changes)
    document = RunConfig.model_validate_json(Path(copy.write()).read_text())
    copy.store.delete([layout.FINAL_MANIFEST])
    for item in copy.store.list(layout.CHECKPOINTS):
        if layout.is_checkpoint_manifest(item.key):
            manifest = CheckpointManifest.model_validate_json(copy.store.get(item.key) or b"")
            copy.store.delete([item.key])
            if manifest.step <= until:
                own = manifest.model_copy(update={"config_hash": config_hash(document.config)})
                copy.store.put(item.key, own.model_dump_json(by_alias=True).encode())
    return copy


def counters(job: Job) -> dict[str, Any]:
    """The counters of its newest checkpoint."""
    state: dict[str, Any] = json.loads(job.newest()["state.json"])
    return {name: state[name] for name in ("step", "iteration", "nonfinite_in_a_row", "loss_scale", "good_steps")}


def seconds_to_end(popen: subprocess.Popen[bytes], limit: float) -> float:
    """How long a process takes to end."""
    begin = time.monotonic()
    popen.wait(limit)
    return time.monotonic() - begin


def children_of(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def variable_of(pid: int, name: str) -> str | None:
    """A variable of a process's environment."""
    found = [v for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if v.startswith(f"{name}=")]
    return found[0].partition("=")[2] if found else os.environ.get(name)
