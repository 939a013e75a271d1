"""What a person sees of a run, as lines and as a panel."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from rich.text import Text

from lora_api.job import JobStatus
from lora_api.run import Progress
from lora_operator.core.views import Event, EventType, JobKey
from lora_operator.local.liveview import LiveView, PlainView, Snapshot, render

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = JobKey("team", "mascot")


def beat(step=0, stage="Training", attempt=1, **more):
    return Progress(start=1, attempt=attempt, stage=stage, step=step, steps=100, updated_at="now", **more)


def a_status(**fields):
    return JobStatus.model_validate({"phase": "Running", "attempt": 1} | fields)


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def plain(screen):
    return PlainView(Console(file=screen, width=40))


def said(screen):
    """The lines without their times."""
    return [line.split("  ", 1)[1] for line in screen.getvalue().splitlines()]


def test_every_event_is_one_line_however_long(plain, screen):
    plain.event(Event(EventType.NORMAL, "Created", "x" * 100 + "\n[bold]y"), NOW)
    assert said(screen) == ["Created: " + "x" * 100 + " [bold]y"]


def test_progress_is_said_about_every_tenth_of_the_run(plain, screen):
    for step in range(101):
        plain.update(Snapshot(KEY, a_status(), beat(step)), NOW)
    assert [line.split()[1] for line in said(screen)] == [f"{step}/100" for step in range(0, 101, 10)]


def test_slow_progress_is_said_every_half_minute(plain, screen):
    for step, second in [(1, 0), (2, 10), (3, 31), (3, 90), (4, 91)]:
        plain.update(Snapshot(KEY, a_status(), beat(step)), NOW + timedelta(seconds=second))
    assert [line.split()[1] for line in said(screen)] == ["1/100", "3/100", "4/100"]


def test_a_line_of_progress_has_what_is_known_and_no_more(plain, screen):
    plain.update(Snapshot(KEY, a_status(), beat(1)), NOW)
    full = beat(50, loss=0.123456, learning_rate=1e-4, steps_per_second=2.5, samples_per_second=5, eta_seconds=75)
    plain.update(Snapshot(KEY, a_status(), full), NOW)
    assert said(screen) == [
        "step 1/100 (1%)",
        "step 50/100 (50%)  loss 0.1235  lr 0.0001  2.5 steps/s  5 samples/s  ETA 1m15s",
    ]


def test_after_a_restart_progress_is_said_from_where_it_goes_on(plain, screen):
    plain.update(Snapshot(KEY, a_status(), beat(58)), NOW)
    plain.update(Snapshot(KEY, a_status(attempt=2), beat(59)), NOW)  # the old attempt's last sign
    plain.update(Snapshot(KEY, a_status(attempt=2), beat(50, attempt=2)), NOW)
    assert [line.split()[1] for line in said(screen)] == ["58/100", "50/100"]


def test_preparation_is_said_once_per_kind_of_work(plain, screen):
    for detail in ("loading the model", "encoding 1/9 pictures", "encoding 2/9 pictures"):
        plain.update(Snapshot(KEY, a_status(), beat(stage="PreparingData", detail=detail)), NOW)
    assert said(screen) == ["loading the model", "encoding 1/9 pictures"]


def panel(status, heartbeat=None, recent=()):
    console = Console(file=io.StringIO(), width=120)
    console.print(render(Snapshot(KEY, status, heartbeat), [Text(line) for line in recent]))
    return console.file.getvalue()


def test_the_panel_shows_job_phase_stage_bar_figures_checkpoints_restarts_and_news():
    status = a_status(
        attempt=2,
        restarts={"preemption": 1, "outOfMemory": 2},
        lostSteps=7,
        output={"location": "/runs/team/mascot/"},
        checkpoints={
            "count": 2,
            "removed": 3,
            "entries": [{"step": step, "start": 1, "sizeBytes": 1500, "committedAt": "now"} for step in (40, 20)],
        },
    )
    text = panel(status, beat(50, attempt=2, loss=0.5, eta_seconds=60), ["12:00:00  Resumed"])
    for part in (
        "team/mascot  Running  attempt 2 · Training",
        "50/100 50%",
        "loss 0.5000  ETA 1m00s",
        "2 kept (step 40, 20; 3.0 kB), 3 removed",
        "1 preemption, 2 out of memory; 7 steps were done again",
        "/runs/team/mascot/",
        "12:00:00  Resumed",
    ):
        assert part in text


def test_the_panel_of_a_resting_job_shows_its_last_known_progress():
    status = a_status(phase="Suspended", progress={"step": 30, "steps": 100})
    text = panel(status, beat(30))
    assert "30/100 30%" in text
    assert "Training" not in text


def test_the_panel_of_a_new_job_is_short():
    assert panel(JobStatus()).split() == ["team/mascot", "Pending"]


def test_the_live_view_leaves_its_last_panel_on_the_screen(screen):
    view = LiveView(Console(file=screen, width=80, force_terminal=True))
    view.note("no GPU", NOW)
    view.event(Event(EventType.WARNING, "Interrupted", "preempted"), NOW)
    view.update(Snapshot(KEY, a_status(), beat(10)), NOW)
    view.close()
    for part in ("no GPU", "Interrupted", "10/100"):
        assert part in screen.getvalue()
