"""Starting long-running processes and stopping only those.

A process is known by its id and its start time, because the kernel hands ids out again. Each process also carries
the cluster's run folder in its environment, which finds what a killed launcher had no time to write down and the
helpers that containerd starts by itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.settings import OWNER_VARIABLE, ClusterError


@dataclass(frozen=True)
class Recorded:
    """A started process as it was written down."""

    name: str
    pid: int
    start_ticks: int


def start_ticks_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the command in parentheses may itself hold spaces and parentheses: fields are counted after the last one
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(recorded: Recorded) -> bool:
    """Whether the very process that was recorded still runs."""
    return start_ticks_of(recorded.pid) == recorded.start_ticks


def carries_owner(pid: int, owner: Path) -> bool:
    """Whether a process was started, directly or not, by the cluster with this run folder."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{OWNER_VARIABLE}={owner}".encode() in environment.split(b"\0")


# kept so that a long test session can collect the ones that ended: nobody else waits for them
_children: list[subprocess.Popen[bytes]] = []


class ProcessTable:
    """The processes of one cluster, recorded as one small file each."""

    def __init__(self, folder: Path, owner: Path) -> None:
        self.folder = folder
        self.owner = owner

    def start(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> int:
        """Starts a process that outlives this one and records it.

        Returns:
            Its process id.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
                env={**os.environ, **(environment or {}), OWNER_VARIABLE: str(self.owner)},
            )
        _children.append(process)
        record = {"pid": process.pid, "start_ticks": start_ticks_of(process.pid) or 0, "log": str(log)}
        (self.folder / f"{name}.json").write_text(json.dumps(record))
        return process.pid

    def recorded(self) -> list[Recorded]:
        """What was written down; a file cut short by a crash is left out, the sweep finds its process."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                entry = json.loads(path.read_text())
                found.append(Recorded(path.stem, int(entry["pid"]), int(entry["start_ticks"])))
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def alive(self) -> dict[str, Recorded]:
        """The recorded processes that still run, by name."""
        return {entry.name: entry for entry in self.recorded() if is_alive(entry)}

    def require_alive(self, name: str) -> str | None:
        """None while a process runs, else a sentence with the end of its log; fits `wait_until(give_up=...)`."""
        if name in self.alive():
            return None
        path = self.folder / f"{name}.json"
        log = Path(json.loads(path.read_text())["log"]) if path.exists() else None
        return f"{name} has exited; {log}:\n{tail(log)}" if log else f"{name} was never started"

    def stop(self, names: Iterable[str], grace_seconds: float) -> None:
        """Ends recorded processes: asked first, killed after the grace; strangers with their ids are left alone."""
        wanted = set(names)
        chosen = [entry for entry in self.recorded() if entry.name in wanted]
        end_processes([entry for entry in chosen if is_alive(entry)], grace_seconds)
        for entry in chosen:
            (self.folder / f"{entry.name}.json").unlink(missing_ok=True)

    def sweep(self) -> list[int]:
        """Kills every process that carries this cluster's mark, recorded or not.

        Returns:
            The ids that were found, for the report.
        """
        found = self.marked()
        end_processes([Recorded(str(pid), pid, ticks) for pid, ticks in found.items()], grace_seconds=0)
        return list(found)

    def marked(self) -> dict[int, int]:
        """Start times by process id of all that carry this cluster's mark, this process and its parents excepted."""
        marked: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            ticks = start_ticks_of(int(entry.name))
            if ticks is not None and carries_owner(int(entry.name), self.owner):
                marked[int(entry.name)] = ticks
        return marked


def end_processes(targets: Sequence[Recorded], grace_seconds: float) -> None:
    """Ends processes and waits for their end.

    A pidfd is opened first and the start time compared after: from then on the signal cannot reach another process
    that got the same id.
    """
    handles: dict[int, Recorded] = {}
    try:
        for target in targets:
            try:
                handle = os.pidfd_open(target.pid)
            except ProcessLookupError:
                continue
            handles[handle] = target
        verified = [handle for handle, target in handles.items() if is_alive(target)]
        if grace_seconds > 0:
            _signal_all(verified, signal.SIGTERM)
            verified = _still_running(verified, grace_seconds)
        _signal_all(verified, signal.SIGKILL)
        left = _still_running(verified, 10)
        if left:
            raise ClusterError(f"processes {[handles[handle].pid for handle in left]} do not end after SIGKILL")
    finally:
        for handle in handles:
            os.close(handle)


def _signal_all(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            continue


def _still_running(handles: Sequence[int], timeout_seconds: float) -> list[int]:
    """The handles whose processes have not ended when time is up."""
    waiting = set(handles)
    poll = select.poll()
    for handle in waiting:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + timeout_seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(left * 1000):
            poll.unregister(handle)
            waiting.discard(handle)
    for child in _children:
        child.poll()
    return sorted(waiting)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, shortened: an error must fit on a screen."""
    try:
        content = log.read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(line[:300] for line in content[-lines:])
