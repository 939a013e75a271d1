"""What a local run remembers between two calls: the objects an API server would hold, the log files, the lock."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_operator.adapters import local_pods
from lora_operator.core.views import Manifest

_OBJECTS = "objects.json"
_EVENTS = "events.jsonl"
_LOCK = "lock"
_KEPT_LOGS = 50
_MOST_EVENTS = 500
_GRACE_SLACK_SECONDS = 2.0
_PERIOD_SECONDS = 0.1
_LOCK_TRIES = 5


class BusyError(Exception):
    """Another `lora-operator run` of the same job is at work; `pid` is its process where known."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f"process {pid}" if pid else "another process")
        self.pid = pid


@dataclass
class Objects:
    """The API server's memory."""

    job: Manifest
    children: list[Manifest] = field(default_factory=list)  # batch/v1 Jobs
    pods: list[Manifest] = field(default_factory=list)


class LocalState:
    """The folder of one job's local state; only the holder of the lock writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.pods = folder / "pods"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock; it ends with the process, however that ends.

        Raises:
            BusyError: When another process holds it.
            OSError: When the folder can't be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(handle):
                text = os.read(handle, 32).decode()
                raise BusyError(int(text) if text.isdigit() else None)
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)

    def is_busy(self) -> bool:
        """Whether a run is at work right now."""
        if not (self.folder / _LOCK).exists():
            return False
        with (self.folder / _LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def load(self) -> Objects | None:
        """The objects as last saved; None when there are none, or none that can be read."""
        try:
            raw = json.loads((self.folder / _OBJECTS).read_text())
            return Objects(raw["job"], raw["children"], raw["pods"])
        except (OSError, ValueError, KeyError):
            return None

    def save(self, objects: Objects) -> None:
        """Writes the objects, all or nothing."""
        content = {"job": objects.job, "children": objects.children, "pods": objects.pods}
        write_atomically(self.folder / _OBJECTS, json.dumps(content, indent=1))

    def forget(self) -> None:
        """Removes objects and events; logs stay."""
        for name in (_OBJECTS, _EVENTS):
            (self.folder / name).unlink(missing_ok=True)

    def append_event(self, entry: dict[str, Any]) -> None:
        """Adds a line to the job's events."""
        with (self.folder / _EVENTS).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """The events, oldest first; at most the newest 500."""
        with suppress(OSError):
            lines = (self.folder / _EVENTS).read_text().splitlines()[-_MOST_EVENTS:]
            return [json.loads(line) for line in lines if line.endswith("}")]
        return []

    def log_of(self, pod_name: str) -> Path:
        """The log file of a pod."""
        return self.logs / f"{pod_name}.log"

    def newest_log(self) -> Path | None:
        """The log that was written last."""
        return max(self.logs.glob("*.log"), key=lambda file: file.stat().st_mtime_ns, default=None)

    def remove_old_logs(self) -> None:
        """Keeps the newest logs only."""
        files = sorted(self.logs.glob("*.log"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-_KEPT_LOGS]:
            file.unlink(missing_ok=True)

    def stop_leftovers(self) -> dict[str, str]:
        """Ends the processes of a run that was killed. Returns pod name -> termination message.

        Such pods got SIGTERM when their leash broke, so they are given the rest of their grace period to save.
        """
        messages = {}
        for folder in self.pods.glob("*"):
            record = folder / local_pods.RECORD
            for pid in local_pods.living(record)[:1]:  # the shim; the command itself where that is gone
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + _grace_of(record) + _GRACE_SLACK_SECONDS
            while local_pods.living(record) and time.monotonic() < deadline:
                time.sleep(_PERIOD_SECONDS)
            local_pods.kill_recorded(record)
            log = folder / local_pods.TERMINATION_LOG
            messages[folder.name] = log.read_text(errors="replace") if log.is_file() else ""
        shutil.rmtree(self.pods, ignore_errors=True)  # with the Secrets of pods that nobody cleared away
        return messages

    def has_leftovers(self) -> bool:
        """Whether processes of a run that was killed still live."""
        return any(local_pods.living(folder / local_pods.RECORD) for folder in self.pods.glob("*"))


def _lock(handle: int) -> bool:
    """Takes the lock. Tries for a moment: `lora-operator status` holds it for an instant to see whether it is free."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PERIOD_SECONDS)
        else:
            return True
    return False


def _grace_of(record: Path) -> float:
    with suppress(OSError, ValueError, KeyError):
        return float(json.loads(record.read_text())["graceSeconds"])
    return 0.0


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that readers see the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
