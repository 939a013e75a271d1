"""Heartbeats, metric lines and log lines, without a training run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

from lora_api import layout
from lora_api.run import ExitWord, Progress
from lora_api.store import StoreError
from lora_api.stores import DirectoryStore
from lora_trainer.exporter import SnapshotCollector
from lora_trainer.fence import Fence
from lora_trainer.reporting import Reporter, Snapshot
from lora_trainer.views import Bar, Lines, describe

DONE = ExitWord(code=0, reason="Completed", message="finished")


def await_true(condition, what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


def reporter(store, **options) -> Reporter:
    made = Reporter(store, 3, 2, heartbeat_seconds=0.02, **options)
    made.now.steps = 10
    return made


def progress(store) -> Progress | None:
    raw = store.get(layout.PROGRESS)
    return Progress.model_validate_json(raw) if raw else None


def test_the_heartbeat_comes_at_once_and_follows_the_stage(store):
    made = reporter(store)
    made.open()
    await_true(lambda: progress(store), "a heartbeat")
    made.enter("PreparingData", "encoding 5/12 pictures")
    await_true(lambda: progress(store).detail == "encoding 5/12 pictures", "the new stage")
    made.close(DONE)
    last = progress(store)
    assert (last.start, last.attempt, last.stage, last.exit) == (3, 2, "PreparingData", DONE)


def test_a_training_that_hangs_keeps_its_heartbeat_but_not_its_sign_of_progress(store, monkeypatch):
    moments = (f"2026-01-01T00:00:{second:02d}Z" for second in range(60))
    monkeypatch.setattr("lora_trainer.clock.now", lambda: next(moments))
    made = reporter(store)
    made._beat(None)

    def told() -> bool:
        """Whether a heartbeat now says that something was done since the one before."""
        before = progress(store).advanced_at
        made._beat(None)
        return progress(store).advanced_at > before

    made.enter("PreparingData", "loading the base model")
    assert [told(), told()] == [True, True], "what can't tell how far it is counts as alive outside of training"
    made.enter("Training")
    assert [told(), told(), told()] == [True, False, False]
    made.stepped(step=1, loss=1.0, lr=1e-3, grad_norm=0.5, seconds=0.5)
    assert [told(), told()] == [True, False]
    made.advanced()
    assert [told(), told()] == [True, False]
    made.detail("drawing sample 2/4")
    assert [told(), told()] == [True, False]
    with made.long_work():
        assert [told(), told()] == [True, True]
    assert [told(), told()] == [True, False]


def test_loss_and_speed_are_smoothed_and_the_rest_is_derived(store):
    made = reporter(store)
    made.now.samples_per_step = 4
    for step, loss in ((1, 1.0), (2, 3.0)):
        made.stepped(step=step, loss=loss, lr=1e-3, grad_norm=0.5, seconds=0.5)
    now = made.progress()
    assert (now.loss, now.steps_per_second, now.samples_per_second, now.eta_seconds) == (2.0, 2.0, 8.0, 4.0)


def test_metric_lines_are_written_with_the_commit_and_at_the_end(store):
    made = reporter(store)
    made.open()
    made.stepped(step=1, loss=1.23456789, lr=1e-3, grad_norm=0.5, seconds=0.5)
    made.committed()
    await_true(lambda: store.get(layout.metrics(3)), "metric lines")
    made.stepped(step=2, loss=1.0, lr=1e-3, grad_norm=0.5, seconds=0.5)
    made.close(DONE)
    lines = [json.loads(line) for line in store.get(layout.metrics(3)).splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert list(lines[0].pop("startup_seconds")) == ["starting"]
    assert lines[0] == {"step": 1, "loss": 1.23457, "lr": 0.001, "grad_norm": 0.5, "seconds": 0.5, "samples": 1}


def test_a_run_of_millions_of_steps_logs_a_bounded_number_of_lines(store):
    made = reporter(store)
    made.now.steps = 1_000_000
    for step in range(1, 1001):
        made.stepped(step=step, loss=1.0, lr=1e-3, grad_norm=0.5, seconds=0.5)
    assert len(made._lines) == 20


def test_a_newer_start_silences_the_older_one_s_reports(store):
    made = reporter(store, fence=Fence.raise_up(store, 1))
    made.open()
    await_true(lambda: progress(store), "a heartbeat")
    Fence.raise_up(store, 2)
    await_true(lambda: made.fenced is not None, "the fence to be noticed")
    store.put(layout.PROGRESS, b"the newer one's")
    made.stepped(step=1, loss=1.0, lr=1e-3, grad_norm=0.5, seconds=0.5)
    made.close(DONE)
    assert store.get(layout.PROGRESS) == b"the newer one's"
    assert store.get(layout.metrics(3)) is None


def test_a_store_that_fails_for_a_while_is_named_once_and_caught_up(tmp_path, caplog):
    class Away(DirectoryStore):
        away = True

        def put(self, key, data):
            if self.away:
                raise StoreError("the store is away")
            super().put(key, data)

    store = Away(tmp_path)
    made = reporter(store)
    made.open()
    made.stepped(step=1, loss=1.0, lr=1e-3, grad_norm=0.5, seconds=0.5)
    made.committed()
    await_true(lambda: "can't be written" in caplog.text, "the complaint")
    store.away = False
    await_true(lambda: progress(store), "a heartbeat")
    made.close(DONE)
    assert caplog.text.count("can't be written") == 1
    assert store.get(layout.metrics(3))


def test_other_ranks_report_nothing():
    made = Reporter(None, 1, 1)
    made.open()
    made.stepped(step=1, loss=1.0, lr=1e-3, grad_norm=0.5, seconds=0.5)
    made.close(DONE)
    assert made.now.step == 1


# ---------------------------------------------------------------------- for people
def test_log_lines_say_what_people_ask():
    now = Snapshot(stage="Training", step=120, steps=9000, loss=0.43211, learning_rate=1e-4, step_seconds=0.5)
    assert describe(now) == "step 120/9000  loss 0.4321  lr 1.0e-04  2.00 it/s  ETA 1:14:00"
    now.nonfinite_steps = 2
    assert describe(now).endswith("2 steps skipped: not finite")
    assert (
        describe(Snapshot(stage="PreparingData", detail="encoding 1/2 pictures"))
        == "PreparingData: encoding 1/2 pictures"
    )


def test_lines_are_said_for_each_stage_and_not_for_each_step(caplog):
    caplog.set_level("INFO")
    lines, now = Lines(), Snapshot(stage="Training", steps=100)
    for step in range(50):
        now.step = step
        lines.show(now)
    now.stage, now.detail = "Finalizing", "exporting the adapter"
    lines.show(now)
    lines.close(now)
    assert [record.message for record in caplog.records] == [
        "step 0/100",
        "step 49/100",
        "Finalizing: exporting the adapter",
    ]


def test_the_bar_shows_the_same_numbers(capsys):
    bar, now = Bar(), Snapshot(stage="Training", step=5, steps=10, loss=1.5, learning_rate=1e-4, step_seconds=0.5)
    bar.show(now)
    bar.close(now)
    assert re.search(r"Training .*5/10.*loss 1\.5000", capsys.readouterr().err)


def test_prometheus_reads_the_same_snapshot():
    now = Snapshot(step=5, steps=10, loss=1.5, step_seconds=0.5, samples_per_step=4, lost_steps=3)
    values = {sample.name: sample.value for metric in SnapshotCollector(now).collect() for sample in metric.samples}
    assert values["lora_trainer_step"] == 5
    assert values["lora_trainer_samples_per_second"] == 8
    assert values["lora_trainer_lost_steps_total"] == 3
    assert "lora_trainer_learning_rate" not in values


# ---------------------------------------------------------------------- the command line
def test_help_and_the_launcher_come_without_torch():
    script = (
        "import sys, lora_trainer.launch, lora_trainer.cli\n"
        "from typer.testing import CliRunner\n"
        "result = CliRunner().invoke(lora_trainer.cli.app, ['train', '--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert '--run_config' in result.output and '85 stopped' in result.output, result.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_unknown_option_is_a_usage_error():
    from typer.testing import CliRunner

    from lora_trainer.cli import app

    assert CliRunner().invoke(app, ["train", "--runconfig", "x"]).exit_code == 64
