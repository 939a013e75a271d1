"""One process at a time, on this machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.report import step


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds a lock file; a second caller waits and is told for whom. The kernel frees it when its holder dies.

    Args:
        path: the lock file, which stays: removing it would let two holders in.
        what: what the holder does, as in "is changing the cluster".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            with step(f"waited, because another process ({lock.read().strip() or '?'}) {what}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield
