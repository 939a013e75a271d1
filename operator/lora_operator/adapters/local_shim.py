"""Runs one container's command the way a container runtime does; started by `local_pods` for every pod.

A program of its own that knows only the standard library, so that it starts in milliseconds:
`python -I -S local_shim.py RECORD GRACE_SECONDS COMMAND...`.

What it promises:
- Standard input is the leash. When it closes, because the pod is deleted or because `lora-operator` is gone for any
  reason (`kill -9` included), the command gets SIGTERM, and SIGKILL after its grace period.
- SIGTERM, SIGINT and SIGHUP mean the same; SIGUSR1 kills at once.
- A pod is its first process: when that ends, everything it started is killed, whatever session it moved itself to.
- RECORD names the processes and when they began, so that a later run can tell them from strangers with their numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GENTLE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def birth_of(pid: int) -> str | None:
    """When a process began, in ticks since boot; None when there is no such process (a zombie is none).

    Without /proc (macOS) every living process is born at "?".
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return "?"
    try:
        # the name in parentheses may hold anything, so count from its end
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def children_of(pid: int) -> list[int]:
    """Direct children; empty where /proc can't tell."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_tree(root: int) -> None:
    """SIGKILL to a process, its group and all below it, leaves last: nobody is left to start new ones."""
    below = children_of(root)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(root, signal.SIGKILL)
    for child in below:
        kill_tree(child)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the shim does without."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Shim:
    """The loop: wait for the command, the leash, or a signal."""

    def __init__(self, record: Path, grace_seconds: float, command: list[str]) -> None:
        self._record, self._grace, self._command = record, grace_seconds, command
        self._deadline: float | None = None
        self._process: subprocess.Popen[bytes] | None = None  # kept: when collected, it would reap the command itself
        self._pid = 0

    def run(self) -> int:
        """Runs the command to its end. Returns its exit code, 128 + signal where a signal ended it."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (*_GENTLE, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        try:
            self._pid = self._start()
        except OSError as error:
            print(f"{self._command[0]}: {error.strerror or error}", file=sys.stderr)  # noqa: T201 - the pod's log
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        self._write_record()
        code = self._watch(wake_read)
        self._sweep()
        return code

    def _start(self) -> int:
        def set_up() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            process_group=0,  # the terminal's Ctrl-C is not for it
            preexec_fn=set_up,  # noqa: PLW1509 - the shim has one thread
        )
        return self._process.pid

    def _write_record(self) -> None:
        entries = [{"pid": pid, "birth": birth_of(pid)} for pid in (os.getpid(), self._pid)]
        partial = self._record.with_suffix(".partial")
        partial.write_text(json.dumps({"processes": entries, "graceSeconds": self._grace}))
        partial.replace(self._record)

    def _watch(self, wake: int) -> int:
        watched = [wake, 0]
        while True:
            code = self._reap()
            if code is not None:
                return code
            wait = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready, _, _ = select.select(watched, [], [], wait)
            if 0 in ready and not os.read(0, 64):
                watched.remove(0)
                self._stop()
            if wake in ready:
                received = set(os.read(wake, 4096))
                if received & set(_GENTLE):
                    self._stop()
                if signal.SIGUSR1 in received:
                    self._deadline = 0.0
            if self._deadline is not None and time.monotonic() >= self._deadline:
                kill_tree(self._pid)
                self._deadline = time.monotonic() + 1  # again, should anything have slipped through

    def _stop(self) -> None:
        """SIGTERM to the first process alone, as the kubelet does; whom it started is its own business."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def _reap(self) -> int | None:
        """Collects whoever ended; the first process' exit code once it is among them."""
        code = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
        return code if code is None or code >= 0 else 128 - code

    def _sweep(self) -> None:
        """Kills what the first process left behind; orphans are handed to the shim, so none can hide."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        while orphans := children_of(os.getpid()):
            for pid in orphans:
                kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def main(arguments: list[str]) -> int:
    """`RECORD GRACE_SECONDS COMMAND...`."""
    return Shim(Path(arguments[0]), float(arguments[1]), arguments[2:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
