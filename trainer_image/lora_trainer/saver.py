"""Saving in the background: the loop takes a snapshot, a thread makes it a checkpoint while training goes on.

One checkpoint is in flight at most. One that falls due before the last is committed waits for it, and training with it:
which checkpoints exist then follows from the configuration, not from the store's speed.

Ranks agree on how rank 0's saving stands with everything else they agree on in an iteration. So no rank waits for an upload
unless all do, and a commit that failed ends all of them in the same iteration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from lora_api.run import CheckpointManifest
from lora_api.store import Store
from lora_trainer import checkpoint, clock
from lora_trainer.errors import TransientError
from lora_trainer.fence import Fence
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import Group

log = logging.getLogger(__name__)

WORTH_SAYING_SECONDS = 1.0
Contents = Mapping[str, bytes | memoryview]


class Saving(IntEnum):
    """How the newest save stands."""

    IDLE = 0  # committed, or nothing was to be saved
    BUSY = 1
    FAILED = 2


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint to be.

    Args:
        step: Updates done.
        files: Makes the files' bytes; called once, in the saving thread.
        begun: When it was taken, by `clock.seconds()`.
    """

    step: int
    files: Callable[[], Contents]
    begun: float


@dataclass
class Saver:
    """Commits snapshots in the order in which they come; on rank 0.

    Args:
        store: The run directory, with retries.
        fence: The claim.
        uid: Of the job.
        config_hash: Of its configuration.
        committed: Called in the saving thread with each manifest, after it is written.
    """

    store: Store
    fence: Fence
    uid: str
    config_hash: str
    committed: Callable[[CheckpointManifest], None]
    failure: BaseException | None = None
    _thread: threading.Thread | None = None

    @property
    def state(self) -> Saving:
        """How the newest save stands."""
        if self._thread is not None and self._thread.is_alive():
            return Saving.BUSY
        return Saving.IDLE if self.failure is None else Saving.FAILED

    def begin(self, snapshot: Snapshot) -> None:
        """Saves in the background; nothing else is in flight."""
        assert self.state is Saving.IDLE, "whoever begins has waited for the save before"
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="saver", daemon=True)
        self._thread.start()

    def wait(self) -> Saving:
        """Waits until nothing is in flight; returns how it went."""
        if self._thread is not None:
            self._thread.join()
        return self.state

    def _save(self, snapshot: Snapshot) -> None:
        try:
            manifest = checkpoint.commit(
                self.store, self.fence, snapshot.files(), step=snapshot.step, uid=self.uid,
                config_hash=self.config_hash, begun=snapshot.begun,
            )  # fmt: skip
            seconds = clock.seconds() - snapshot.begun
            log.info(
                "committed the checkpoint of step %d: %.1f MB in %.2f s",
                manifest.step,
                manifest.size_bytes / 1e6,
                seconds,
            )
            self.committed(manifest)
        except BaseException as error:  # noqa: BLE001 - it is raised where all ranks hear of it
            self.failure = error


@dataclass
class Saves:
    """Saving as every rank sees it.

    Args:
        saver: On rank 0.
        group: All ranks.
        reporter: Told that training waits; its own failure counts as one of saving, both mean that this start is over.
        committed_step: Of the checkpoint that this start went on from.
        heard_of_commit: Called with a step once this rank knows that its checkpoint is committed.
    """

    saver: Saver | None
    group: Group
    reporter: Reporter
    committed_step: int
    heard_of_commit: Callable[[int], None]
    stall_seconds: float = 0.0  # that training stood still for saving
    taken_step: int = field(init=False)  # of the newest snapshot, committed or not
    _busy: bool = False  # as far as all ranks know

    def __post_init__(self) -> None:
        self.taken_step = self.committed_step

    @property
    def state(self) -> Saving:
        """What this rank brings into the agreement; only rank 0 knows anything."""
        if self.reporter.fenced is not None:
            return Saving.FAILED
        return self.saver.state if self.saver is not None else Saving.IDLE

    def heard(self, agreed: Saving) -> None:
        """Takes over what all ranks agreed on, before this iteration's update.

        Raises:
            FencedError: On rank 0, when a newer start exists.
            StoreError: On rank 0, when the store could not be used for the last commit.
            TransientError: On the others, when rank 0 could not commit.
        """
        if agreed is Saving.FAILED:
            raise self._failure()
        self._busy = agreed is Saving.BUSY
        if not self._busy and self.taken_step > self.committed_step:
            self.committed_step = self.taken_step
            self.heard_of_commit(self.committed_step)

    def save(self, step: int, take: Callable[[], Snapshot | None]) -> None:
        """Saves step `step` in the background.

        Args:
            step: Updates done.
            take: Takes the snapshot; called on every rank once nobody reads the one before, returns one on rank 0.

        Raises:
            BaseException: As `heard`, for the save before.
        """
        begin = clock.seconds()
        if self._busy:
            self._await_the_one_before(step)
        snapshot = take()
        self.taken_step, self._busy = step, True
        if self.saver is not None:
            assert snapshot is not None, "rank 0 takes the snapshot"
            self.saver.begin(snapshot)
        self.stall_seconds += clock.seconds() - begin

    def finish(self) -> None:
        """Waits until the newest save is committed; every rank returns, or raises, together.

        Raises:
            BaseException: As `heard`.
        """
        if self.saver is not None and self.saver.state is Saving.BUSY:
            self.reporter.detail(f"saving step {self.taken_step}")
        with self.reporter.long_work():
            self._wait()
        self.reporter.detail("")

    def close(self) -> None:
        """Lets what is in flight come to its end, after an error too: what it saves was good."""
        if self.saver is not None and self.saver.wait() is Saving.FAILED:
            log.warning("the newest checkpoint was not committed: %s", self.saver.failure)

    def _await_the_one_before(self, step: int) -> None:
        begin, before = clock.seconds(), self.taken_step
        with self.reporter.long_work():
            self._wait()
        seconds = clock.seconds() - begin
        if seconds > WORTH_SAYING_SECONDS and self.saver is not None:
            log.warning(
                "step %d could be saved only when step %d was committed: training waited %.1f s for the store; "
                "a larger save.save_every avoids that", step, before, seconds,
            )  # fmt: skip

    def _wait(self) -> None:
        state = self.saver.wait() if self.saver is not None else None
        self.heard(self.group.broadcast(state))

    def _failure(self) -> BaseException:
        own = self.reporter.fenced or (self.saver.failure if self.saver is not None else None)
        return own or TransientError(
            "rank 0 could not commit a checkpoint, or a newer start exists; its log says which"
        )
