"""Other ranks of this node that are gone: seen where waiting for them would never end.

gloo tells at once that a peer is gone, and the error ends this rank too. NCCL between GPUs of one node does not: a kernel
waits for the peer's memory, and a signal only sets a flag that nobody looks at. So a thread looks at what the ranks of
this node leave in the launcher's folder, and ends the process when one failed and this one does not notice by itself.
Ranks on other nodes are the business of whoever runs the nodes.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from lora_api.exit_codes import ExitCode

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 3.0  # what this rank gets to notice by itself
_IN_ORDER = (ExitCode.DONE, ExitCode.PREEMPTED)


def lost_peer(folder: Path, rank: int, processes: Path = Path("/proc")) -> str | None:
    """Which other rank of this node failed, and how; None while none did.

    Args:
        folder: Where ranks leave their mark with their process id at the beginning, and their word at the end.
        rank: This one.
        processes: Where the kernel lists processes; on systems without, only words tell.
    """
    for mark in sorted(folder.glob("rank-*.started")):
        other = int(mark.stem.removeprefix("rank-"))
        if other == rank:
            continue
        word = _word(folder / f"rank-{other}.json")
        if word is not None:
            if word[0] not in _IN_ORDER:
                return f"rank {other} ended with code {word[0]}: {word[1]}"
        elif _is_gone(mark, processes):
            return f"rank {other} is gone without a word"
    return None


def _word(path: Path) -> tuple[int, str] | None:
    try:
        word = json.loads(path.read_text())
        return int(word["code"]), str(word["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_gone(mark: Path, processes: Path) -> bool:
    try:
        pid = int(mark.read_text())
    except (OSError, ValueError):
        return False
    if not processes.is_dir():
        return False
    try:
        return (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class PeerWatch:
    """The thread that looks.

    Args:
        folder: See `lost_peer`; None: nothing is watched.
        rank: This one.
        leave: Ends this process; called with what happened to the other rank.

    Attributes:
        saves: Whether a checkpoint is being committed, which needs no other rank and is worth waiting for.
    """

    def __init__(self, folder: Path | None, rank: int, leave: Callable[[str], None]) -> None:
        self._folder, self._rank, self._leave = folder, rank, leave
        self._closed = threading.Event()
        self.saves: Callable[[], bool] = lambda: False

    def start(self) -> None:
        """Begins to look."""
        if self._folder is not None:
            threading.Thread(target=self._watch, args=(self._folder,), name="peers", daemon=True).start()

    def close(self) -> None:
        """This rank ends by itself."""
        self._closed.set()

    def _watch(self, folder: Path) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            lost = lost_peer(folder, self._rank)
            if lost is not None and not self._closed.wait(_PATIENCE_SECONDS) and not self.saves():
                self._leave(lost)
                return
