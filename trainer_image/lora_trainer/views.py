"""How people see a run: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from datetime import timedelta

from lora_trainer import clock
from lora_trainer.reporting import Snapshot, View

log = logging.getLogger("lora_trainer")

_LINE_SECONDS = 10.0


def view_for_stderr() -> View:
    """The bar where stderr is a terminal, lines elsewhere."""
    return Bar() if sys.stderr.isatty() else Lines()


class Lines:
    """One line when something changed, at most every ten seconds, and for each stage."""

    def __init__(self) -> None:
        self._said: tuple[str, str, int] | None = None
        self._next = 0.0

    def show(self, now: Snapshot) -> None:
        """See `reporting.View`."""
        new_stage = self._said is None or self._said[0] != now.stage
        if self._said is not None and self._said[0] == "Training" != now.stage and self._said[2] != now.step:
            log.info("%s", describe(replace(now, stage="Training")))  # where training ended, however short it was
        if (new_stage or clock.seconds() >= self._next) and self._said != (now.stage, now.detail, now.step):
            self._next = clock.seconds() + _LINE_SECONDS
            self._say(now)

    def close(self, now: Snapshot) -> None:
        """See `reporting.View`."""
        if self._said != (now.stage, now.detail, now.step):
            self._say(now)

    def _say(self, now: Snapshot) -> None:
        self._said = (now.stage, now.detail, now.step)
        log.info("%s", describe(now))


class Bar:
    """A progress bar with loss, speed and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.fields[stage]}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=0, stage="", numbers="")
        handlers = (each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler))
        self._handlers = [handler for handler in handlers if handler.stream is sys.stderr]
        self._progress.start()
        self._redirect_log()  # sys.stderr is rich's by now: log lines appear above the bar

    def show(self, now: Snapshot) -> None:
        """See `reporting.View`."""
        numbers = now.detail if now.stage != "Training" else f"{now.course}  {_numbers(now)}".lstrip()
        self._progress.update(self._task, completed=now.step, total=now.steps, stage=now.stage, numbers=numbers)

    def close(self, now: Snapshot) -> None:
        """See `reporting.View`."""
        self.show(now)
        self._progress.stop()
        self._redirect_log()

    def _redirect_log(self) -> None:
        for handler in self._handlers:
            handler.setStream(sys.stderr)


def describe(now: Snapshot) -> str:
    """One line about a run, such as `step 120/9000  loss 0.4321  lr 1.0e-04  2.10 it/s  ETA 1:10:20`."""
    if now.stage != "Training":
        return f"{now.stage}: {now.detail}" if now.detail else now.stage
    course = f"  {now.course}" if now.course else ""
    return f"step {now.step}/{now.steps}{course}  {_numbers(now)}".rstrip()


def _numbers(now: Snapshot) -> str:
    parts = []
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if now.learning_rate is not None:
        parts.append(f"lr {now.learning_rate:.1e}")
    if now.steps_per_second is not None and now.eta_seconds is not None:
        parts += [f"{now.steps_per_second:.2f} it/s", f"ETA {timedelta(seconds=round(now.eta_seconds))}"]
    if now.nonfinite_steps:
        parts.append(f"{now.nonfinite_steps} steps skipped: not finite")
    return "  ".join(parts)
