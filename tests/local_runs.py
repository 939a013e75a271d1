"""A folder with a small job, and `lora-operator` as a process that runs it with the stub trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

STUB = Path(__file__).parent / "stub_trainer"
NAMESPACE, NAME = "default", "stub"
T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, seconds: float = 20.0) -> T:
    """What `look` returns as soon as it is true. Fails after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def job_manifest(**changes: Any) -> dict[str, Any]:
    """A job of 60 steps; `changes` are paths below `spec.config` such as `train__steps=20`."""
    config: dict[str, Any] = {
        "device": "cpu",
        "model": {"arch": "zimage", "name_or_path": "model"},
        "datasets": [{"folder_path": "data"}],
        "train": {"steps": 60, "dtype": "fp32"},
        "save": {"save_every": 10, "max_step_saves": 3},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = config
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return {
        "apiVersion": "lora-operator.io/v1alpha1",
        "kind": "LoRATrainingJob",
        "metadata": {"name": NAME},
        "spec": {"config": config},
    }


class Workbench:
    """A folder with a job manifest, its data and its store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "runs"
        self.run = self.store / NAMESPACE / NAME
        self.state = self.store / ".lora-operator" / NAMESPACE / NAME
        self.job = folder / "job.yaml"
        self._started: list[subprocess.Popen[str]] = []
        for name in ("model", "data"):
            (folder / name).mkdir()
        self.write(job_manifest())

    def write(self, manifest: dict[str, Any]) -> None:
        """The job manifest."""
        self.job.write_text(yaml.safe_dump(manifest))

    def environment(self, **stub: str) -> dict[str, str]:
        """The environment of `lora-operator` with the stub trainer."""
        plain = {name: text for name, text in os.environ.items() if not name.startswith(("STUB_", "AWS_", "MINIO_"))}
        return plain | {
            "PYTHONPATH": str(STUB),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "CUDA_VISIBLE_DEVICES": "",
            **stub,
        }

    def start(self, *arguments: str, **stub: str) -> subprocess.Popen[str]:
        """`lora-operator ARGUMENTS` in the folder, in the background; STUB_... variables steer the trainer."""
        process = subprocess.Popen(
            [sys.executable, "-m", "lora_operator", *arguments],
            cwd=self.folder,
            env=self.environment(**stub),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def clear(self) -> None:
        """Ends what a failed test left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def call(self, *arguments: str, **stub: str) -> tuple[int, str]:
        """Exit code and output of `lora-operator ARGUMENTS`."""
        process = self.start(*arguments, **stub)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def objects(self) -> dict[str, Any]:
        """The saved objects; empty before there are any."""
        try:
            return dict(json.loads((self.state / "objects.json").read_text()))
        except (OSError, ValueError):
            return {}

    def is_suspending(self) -> bool:
        """Whether a signal has been taken."""
        return bool(self.objects().get("job", {}).get("spec", {}).get("runPolicy", {}).get("suspend"))

    def step(self) -> int:
        """The step of the heartbeat."""
        try:
            return int(json.loads((self.run / "progress.json").read_text())["step"])
        except (OSError, ValueError):
            return 0

    def pids(self) -> list[int]:
        """Shim and trainer of the pod that runs."""
        for record in self.state.glob("pods/*/process.json"):
            return [entry["pid"] for entry in json.loads(record.read_text())["processes"]]
        return []

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        manifests = self.run.glob("checkpoints/*/*/manifest.json")
        return sorted(json.loads(path.read_text())["step"] for path in manifests)


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Sends a signal, waits for the end. Returns the output."""
    process.send_signal(number)
    return process.communicate(timeout=60)[0]
