"""What a start tells the outside: the heartbeat, metric lines, log lines. One thread does all the I/O.

The loop only sets fields. A store that fails is logged once and tried again at the next beat: reporting never ends a run.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lora_api import layout
from lora_api.run import Control, ExitWord, Progress, RejectedCheckpoint
from lora_api.run import Stage as LifeStage
from lora_api.store import Store, StoreError
from lora_trainer import clock
from lora_trainer.errors import FencedError
from lora_trainer.fence import Fence
from lora_trainer.stages import Stage, samples_by, steps_left
from lora_trainer.startup import Phases, describe

log = logging.getLogger(__name__)

_SMOOTHING = 0.05  # share of the newest loss and step time in the smoothed ones, once there are twenty
_METRICS_SECONDS = 15.0
_FENCE_BEATS = 5
_MOST_LINES = 20_000


@dataclass
class Snapshot:
    """The numbers of a run as they stand. Written by the main thread, read by the reporter's."""

    stage: LifeStage = "Initializing"
    detail: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    step_seconds: float | None = None
    samples_per_step: int = 1
    stages: tuple[Stage, ...] = ()
    course: str = ""  # which of the run's stages this is
    world_size: int = 1
    resumed_from_step: int | None = None
    lost_steps: int = 0
    save_seconds: float | None = None
    committed_step: int = 0
    nonfinite_steps: int = 0
    advances: int = 0  # signs of progress: a run that hangs has no new ones
    rejected: tuple[RejectedCheckpoint, ...] = ()

    @property
    def steps_per_second(self) -> float | None:
        """Speed over the last steps; None before the first."""
        return 1.0 / self.step_seconds if self.step_seconds else None

    @property
    def eta_seconds(self) -> float | None:
        """Time that the remaining steps take at this speed, each by what it costs in its stage."""
        if not self.step_seconds:
            return None
        left = steps_left(self.stages, self.step, self.steps) if self.stages else max(0, self.steps - self.step)
        return left * self.step_seconds

    @property
    def samples(self) -> int:
        """Samples trained so far."""
        return samples_by(self.stages, self.step, self.world_size) if self.stages else self.step * self.samples_per_step


class View(Protocol):
    """Shows a run to people at a terminal, or in a log."""

    def show(self, now: Snapshot) -> None:
        """Called a few times a second from the reporter's thread."""
        ...

    def close(self, now: Snapshot) -> None:
        """Called once at the end."""
        ...


@dataclass
class Reporter:
    """Reports on one start.

    Args:
        store: The run directory, asked once for each write; None on ranks that report nothing.
        start: Number of this start.
        attempt: Of the run configuration.
        heartbeat_seconds: Between two heartbeats.
        fence: Read every few beats; `fenced` is set when a newer start exists.
        view: For people.
    """

    store: Store | None
    start: int
    attempt: int
    heartbeat_seconds: float = 2.0
    fence: Fence | None = None
    view: View | None = None
    now: Snapshot = field(default_factory=Snapshot)
    fenced: FencedError | None = None
    _advanced_at: str = field(default_factory=clock.now)
    _seen_advances: int = 0
    _long_work: int = 0
    phases: Phases = field(default_factory=lambda: Phases(clock.seconds()))
    _lines: list[str] = field(default_factory=list)
    _updates: int = 0
    _timed: int = 0  # updates since the speed is measured
    _unwritten_lines: bool = False
    _lines_due: bool = False
    _store_fails: bool = False
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False
    _thread: threading.Thread | None = None

    def open(self) -> None:
        """Begins to report, with a heartbeat at once."""
        if self.store is None:
            return
        self._thread = threading.Thread(target=self._report, name="reporter", daemon=True)
        self._thread.start()

    def enter(self, stage: LifeStage, detail: str = "") -> None:
        """A new stage begins; told at once."""
        self.now.stage, self.now.detail = stage, detail
        self.advanced()
        self.phases.enter(detail or stage, clock.seconds())
        self._wake.set()

    def take_stages(self, stages: tuple[Stage, ...], stage: Stage, world_size: int) -> None:
        """What the run consists of, and where it is."""
        self.now.stages, self.now.world_size = stages, world_size
        self._take_stage(stage)

    def enter_stage(self, stage: Stage) -> None:
        """Another stage begins: its steps are expected to take as much longer as there is more to do in them."""
        if self.now.step_seconds and self.now.stages:
            self.now.step_seconds *= stage.work / self.now.stages[stage.number - 1].work
        self._timed = 0  # and are measured anew
        self._take_stage(stage)
        self.line(
            step=self.now.step, stage=stage.number + 1, stages=stage.count, batch_size=stage.batch_size,
            gradient_accumulation=stage.accumulation, samples_per_step=self.now.samples_per_step,
        )  # fmt: skip

    def _take_stage(self, stage: Stage) -> None:
        self.now.samples_per_step = stage.batch_size * stage.accumulation * self.now.world_size
        self.now.course = stage.name

    def detail(self, text: str) -> None:
        """What is being done, for people."""
        self.now.detail = text
        self.phases.enter(text, clock.seconds())
        self.advanced()

    def advanced(self) -> None:
        """A part of a step, of a sample or the like is done: training does not hang."""
        self.now.advances += 1

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """Inside is one piece of work that may take minutes and can't tell how far it is; the heartbeat alone counts."""
        self._long_work += 1
        try:
            yield
        finally:
            self._long_work -= 1
            self.advanced()

    def stepped(self, *, step: int, loss: float, lr: float, grad_norm: float, seconds: float) -> None:
        """One update was done."""
        now = self.now
        self.advanced()
        self._updates, self._timed = self._updates + 1, self._timed + 1
        startup = self._startup() if self._updates == 1 else {}
        share, share_of_time = max(_SMOOTHING, 1.0 / self._updates), max(_SMOOTHING, 1.0 / self._timed)
        now.step, now.learning_rate, now.grad_norm = step, lr, grad_norm
        now.loss = loss if now.loss is None else (1 - share) * now.loss + share * loss
        if now.step_seconds is None:
            now.step_seconds = seconds
        now.step_seconds = (1 - share_of_time) * now.step_seconds + share_of_time * seconds
        if self.store is not None and step % max(1, now.steps // _MOST_LINES) == 0:
            self.line(
                step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=seconds,
                samples=now.samples, **startup,
            )  # fmt: skip

    def _startup(self) -> dict[str, dict[str, float]]:
        """Seconds from the claim to the end of the first step, by what was done."""
        seconds = self.phases.close(clock.seconds())
        if self.store is not None:
            log.info("the first step was done after %.1f s: %s", sum(seconds.values()), describe(seconds))
        return {"startup_seconds": seconds}

    def committed(self) -> None:
        """A checkpoint was committed."""
        self.write_soon()

    def write_soon(self) -> None:
        """Metric lines are written with the next heartbeat, which comes now."""
        self._lines_due = True
        self._wake.set()

    def settings_changed(self, step: int, document: Control) -> None:
        """A control document is in force after `step` updates; written soon, a start after this one has to know it."""
        self.line(step=step, control=document.model_dump(mode="json", by_alias=True))
        self.write_soon()

    def line(self, **values: Any) -> None:
        """Adds a metric line."""
        self._lines.append(json.dumps({name: _short(value) for name, value in values.items()}))
        self._unwritten_lines = True

    def told(self) -> list[dict[str, Any]]:
        """The metric lines of this start."""
        return [json.loads(line) for line in list(self._lines)]

    def close(self, word: ExitWord) -> None:
        """Ends the reports with a last heartbeat that carries the word."""
        if self.store is None:
            return
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        if self.view is not None:
            self.view.close(self.now)
        if self.fenced is None:
            self._write_lines()
            self._beat(word)

    def progress(self, word: ExitWord | None = None) -> Progress:
        """The heartbeat document."""
        now = self.now
        return Progress(
            start=self.start,
            attempt=self.attempt,
            stage=now.stage,
            step=now.step,
            steps=now.steps,
            loss=_short(now.loss),
            learning_rate=now.learning_rate,
            steps_per_second=_short(now.steps_per_second),
            samples_per_second=_short(now.steps_per_second and now.steps_per_second * now.samples_per_step),
            eta_seconds=_short(now.eta_seconds),
            resumed_from_step=now.resumed_from_step,
            lost_steps=now.lost_steps,
            save_seconds=now.save_seconds,
            rejected=now.rejected,
            nonfinite_steps=now.nonfinite_steps,
            detail=now.detail or (now.course if now.stage == "Training" else ""),
            updated_at=clock.now(),
            advanced_at=self._advanced_at,
            exit=word,
        )

    def _report(self) -> None:
        beats, next_beat, next_lines = 0, 0.0, clock.seconds() + _METRICS_SECONDS
        while not self._ended and self.fenced is None:
            time = clock.seconds()
            if self._wake.is_set() or time >= next_beat:
                self._wake.clear()
                beats, next_beat = beats + 1, time + self.heartbeat_seconds
                if beats % _FENCE_BEATS == 0 and self._lost_the_claim():
                    return
                self._beat(None)
            if time >= next_lines or self._lines_due:
                self._lines_due, next_lines = False, time + _METRICS_SECONDS
                self._write_lines()
            if self.view is not None:
                self.view.show(self.now)
            self._wake.wait(min(0.5, self.heartbeat_seconds))

    def _lost_the_claim(self) -> bool:
        try:
            if self.fence is not None:
                self.fence.check()
        except FencedError as error:
            self.fenced = error
        except StoreError:
            return False  # the heartbeat will say so
        return self.fenced is not None

    def _beat(self, word: ExitWord | None) -> None:
        now = self.now
        if now.advances != self._seen_advances or now.stage != "Training" or self._long_work:
            self._seen_advances, self._advanced_at = now.advances, clock.now()
        self._write(layout.PROGRESS, self.progress(word).model_dump_json(by_alias=True))

    def _write_lines(self) -> None:
        if self._unwritten_lines:
            self._unwritten_lines = False
            if not self._write(layout.metrics(self.start), "\n".join(self._lines) + "\n"):
                self._unwritten_lines = True

    def _write(self, key: str, text: str) -> bool:
        assert self.store is not None
        try:
            self.store.put(key, text.encode())
        except StoreError as error:
            if not self._store_fails:
                log.warning("reports can't be written, training goes on: %s", error)
            self._store_fails = True
            return False
        if self._store_fails:
            log.warning("reports can be written again")
        self._store_fails = False
        return True


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
