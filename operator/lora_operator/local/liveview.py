"""What a person sees of a run: a panel that lives on a terminal, or one line per piece of news elsewhere."""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lora_api.job import JobStatus, Phase, ShrunkStatus
from lora_api.run import Progress
from lora_api.shrink import Passes
from lora_operator.core.times import format_bytes, format_duration
from lora_operator.core.views import Event, EventType, JobKey

_EVENTS_SHOWN = 6
_PLAIN_SHARE = 0.1  # a line at least every tenth of the run
_PLAIN_SECONDS = 30.0  # and at least this often
_STYLES = {
    Phase.RUNNING: "bold green",
    Phase.SUCCEEDED: "bold green",
    Phase.FAILED: "bold red",
    Phase.INVALID: "bold red",
    Phase.INTERRUPTED: "bold yellow",
    Phase.SUSPENDED: "bold yellow",
}


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    key: JobKey
    status: JobStatus
    heartbeat: Progress | None = None  # fresher than the status; may be an earlier attempt's

    @property
    def progress(self) -> Progress | None:
        """The heartbeat of what runs now."""
        beat = self.heartbeat
        is_current = beat is not None and beat.attempt == self.status.attempt and beat.exit is None
        return beat if is_current and self.status.phase is Phase.RUNNING else None


class View(Protocol):
    """Shows a run."""

    def note(self, text: str, now: datetime) -> None:
        """Something about this machine or this command."""
        ...

    def event(self, event: Event, now: datetime) -> None:
        """Something that happened to the job."""
        ...

    def update(self, snapshot: Snapshot, now: datetime) -> None:
        """How it stands; called about twice a second."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class PatientConsole(Console):
    """Goes on in silence when its reader has gone away: nobody looking is no reason to stop training."""

    def on_broken_pipe(self) -> None:
        """Sends what is still to come nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class PlainView:
    """Lines with a time in front, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_step = -1
        self._said_at: datetime | None = None
        self._said_detail = ""

    def note(self, text: str, now: datetime) -> None:
        """One line."""
        self._say(text, now)

    def event(self, event: Event, now: datetime) -> None:
        """One line."""
        self._say(f"{event.reason}: {event.message}", now)

    def update(self, snapshot: Snapshot, now: datetime) -> None:
        """A line when a tenth of the steps or half a minute has passed, or when the trainer does something else."""
        beat = snapshot.progress
        if beat is None:
            return
        if beat.stage != "Training":
            if beat.detail and beat.detail.split(" ")[0] != self._said_detail:
                self._said_detail = beat.detail.split(" ")[0]
                self._say(beat.detail, now)
            return
        if self._is_due(beat, now):
            self._said_step, self._said_at = beat.step, now
            self._say("  ".join(_figures(beat)), now)

    def close(self) -> None:
        """Nothing to do."""

    def _is_due(self, beat: Progress, now: datetime) -> bool:
        if beat.step == self._said_step:
            return False
        if beat.step < self._said_step or self._said_at is None:
            return True
        tenth = max(1.0, beat.steps * _PLAIN_SHARE)
        crossed = int(beat.step / tenth) > int(self._said_step / tenth)
        return crossed or (now - self._said_at).total_seconds() >= _PLAIN_SECONDS

    def _say(self, text: str, now: datetime) -> None:
        line = " ".join(text.split("\n"))
        self._console.print(f"{_clock(now)}  {line}", markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A panel that is drawn in place; events scroll through its last lines."""

    def __init__(self, console: Console) -> None:
        self._recent: deque[Text] = deque(maxlen=_EVENTS_SHOWN)
        self._live = Live(console=console, refresh_per_second=4, redirect_stderr=False, redirect_stdout=False)
        self._live.start()
        self._snapshot: Snapshot | None = None

    def note(self, text: str, now: datetime) -> None:
        """A line of the panel."""
        self._recent.append(Text.assemble((_clock(now), "dim"), "  ", text))
        self._draw()

    def event(self, event: Event, now: datetime) -> None:
        """A line of the panel."""
        style = "yellow" if event.type is EventType.WARNING else "cyan"
        self._recent.append(Text.assemble((_clock(now), "dim"), "  ", (event.reason, style), f" {event.message}"))
        self._draw()

    def update(self, snapshot: Snapshot, now: datetime) -> None:  # noqa: ARG002 - the Protocol's
        """Redraws the panel."""
        self._snapshot = snapshot
        self._draw()

    def close(self) -> None:
        """Leaves the last panel on the screen."""
        self._live.stop()

    def _draw(self) -> None:
        if self._snapshot is not None:
            self._live.update(render(self._snapshot, list(self._recent)))


def render(snapshot: Snapshot, recent: list[Text]) -> RenderableType:
    """The panel."""
    status, beat = snapshot.status, snapshot.progress
    head = Text.assemble((str(snapshot.key), "bold"), "  ", (status.phase.value, _STYLES.get(status.phase, "bold")))
    doing = _doing(status, beat)
    if doing:
        head.append(f"  {doing}", style="dim")
    step, steps = (beat.step, beat.steps) if beat and beat.stage == "Training" else _last_known(status)
    rows: list[RenderableType] = [head]
    if steps:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=steps, completed=step, width=40), f"{step}/{steps}", f"{100 * step // steps}%")
        rows.append(bar)
    if beat is not None:
        rows.append(Text("  ".join(_figures(beat)[1:])))
    facts = Table.grid(padding=(0, 2))
    for name, text in facts_of(status):
        facts.add_row(Text(name, style="dim"), text)
    return Group(*rows, facts, *recent)


def facts_of(status: JobStatus) -> list[tuple[str, str]]:
    """Checkpoints, restarts, where it goes: name and text."""
    facts = []
    ledger = status.checkpoints
    if ledger.count:
        steps = ", ".join(str(entry.step) for entry in ledger.entries[:8])
        size = format_bytes(sum(entry.size_bytes for entry in ledger.entries))
        facts.append(("checkpoints", f"{ledger.count} kept (step {steps}; {size}), {ledger.removed} removed"))
    if status.restarts.total:
        facts.append(("restarts", restarts_text(status)))
    if status.shrunk is not None:
        facts.append(("memory", shrunk_text(status.shrunk)))
    if status.output.location:
        facts.append(("output", status.output.location))
    return facts


def shrunk_text(shrunk: ShrunkStatus) -> str:
    """`made smaller 2 times: batch_size 1 x gradient_accumulation 4`."""
    often = "once" if shrunk.times == 1 else f"{shrunk.times} times"
    now = Passes(shrunk.batch_size, shrunk.gradient_accumulation, shrunk.gradient_checkpointing)
    return f"made smaller {often}: {now}"


def restarts_text(status: JobStatus) -> str:
    """`2 preemption, 1 failure; 12 steps were done again`."""
    counts = status.restarts.model_dump(by_alias=False)
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    lost = f"; {status.lost_steps} steps were done again" if status.lost_steps else ""
    return ", ".join(parts) + lost


def _figures(beat: Progress) -> list[str]:
    """Step, loss, rate, speed, time left; what is not known yet is left out."""
    figures = [f"step {beat.step}/{beat.steps} ({100 * beat.step // max(1, beat.steps)}%)"]
    if beat.loss is not None:
        figures.append(f"loss {beat.loss:.4f}")
    if beat.learning_rate is not None:
        figures.append(f"lr {beat.learning_rate:.3g}")
    if beat.steps_per_second:
        figures.append(f"{beat.steps_per_second:.3g} steps/s")
    if beat.samples_per_second:
        figures.append(f"{beat.samples_per_second:.3g} samples/s")
    if beat.eta_seconds is not None:
        figures.append(f"ETA {format_duration(beat.eta_seconds)}")
    return figures


def _doing(status: JobStatus, beat: Progress | None) -> str:
    detail = beat.detail if beat and beat.stage != "Training" else ""
    stage = beat.stage if beat else status.stage or ""
    attempt = f"attempt {status.attempt}" if status.attempt > 1 else ""
    return " · ".join(part for part in (attempt, stage, detail) if part)


def _last_known(status: JobStatus) -> tuple[int, int]:
    return (status.progress.step, status.progress.steps) if status.progress else (0, 0)


def _clock(now: datetime) -> str:
    return now.astimezone().strftime("%H:%M:%S")
