"""Being asked to stop: SIGTERM and SIGINT, from the first import to the last byte.

Two manners. While there is nothing to save (imports, loading, encoding, finalizing) a signal raises `Stopped` in the
main thread at once; if that thread is deep in native code and does not notice, a watching thread ends the process a
little later. In `deferred()` (training, saving) a signal only sets a flag, which the loop agrees on across ranks at the
end of the step.

Imports nothing heavy: it is installed before everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PREEMPTED = 85  # lora_api.exit_codes.ExitCode.PREEMPTED, without its imports
PATIENCE_SECONDS = 3.0
PARENT_VARIABLE = "LORA_LAUNCHER_PID"


class Stopped(BaseException):
    """The process was asked to stop. Not an Exception: `except Exception` must not swallow it."""


class StopRequest:
    """Remembers that a signal arrived, and raises `Stopped` unless that is deferred."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.last_words: Callable[[], None] = lambda: None
        self._deferred = 0
        self._raised = False

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal_name is not None

    def install(self) -> None:
        """Takes over SIGTERM and SIGINT; main thread only, once."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)  # written by the interpreter even when it is busy
        threading.Thread(target=self._watch, args=(wake_read,), name="signals", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def check(self) -> None:
        """Raises `Stopped` if a signal arrived while it was deferred, or was swallowed."""
        if self.requested and not self._deferred:
            self._raised = True
            raise Stopped(self.signal_name)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal only sets the flag."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def _watch(self, wake_read: int) -> None:
        """Ends the process when the main thread does not notice a signal that nothing has to be saved for."""
        while True:
            number = os.read(wake_read, 1)[0]
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            time.sleep(PATIENCE_SECONDS)
            if not self._deferred and not self._raised:
                self.signal_name = signal.Signals(number).name
                self.last_words()
                os._exit(_PREEMPTED)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        if not self._deferred and not self._raised:
            self._raised = True
            raise Stopped(self.signal_name)


STOP = StopRequest()
"""The process's one stop request; signals belong to processes."""


def follow_launcher() -> None:
    """Tells the launcher that signals are handled, and asks the kernel for SIGTERM when it dies (Linux only).

    No rank then outlives its launcher unseen and goes on writing.
    """
    launcher = os.environ.get(PARENT_VARIABLE)
    if launcher is None or os.getppid() != int(launcher):
        return
    mark = Path(os.environ["LORA_WORD_DIR"]) / f"rank-{os.environ.get('RANK', '0')}.started"
    with contextlib.suppress(OSError):
        mark.write_text(str(os.getpid()))
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return
    if os.getppid() != int(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)
