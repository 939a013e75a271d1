"""Stopping processes: only those that were started here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.processes import ProcessTable, Recorded, end_processes, is_alive, start_ticks_of, tail


@pytest.fixture
def table(tmp_path: Path):
    table = ProcessTable(tmp_path / "processes", tmp_path)
    yield table
    table.sweep()


def wait_for(condition, seconds: float = 10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write_record(table: ProcessTable, name: str, pid: int, start_ticks: int) -> None:
    table.folder.mkdir(parents=True, exist_ok=True)
    content = {"pid": pid, "start_ticks": start_ticks, "log": "/nowhere"}
    (table.folder / f"{name}.json").write_text(json.dumps(content))


def test_a_started_process_is_recorded_and_ends_when_asked(table, tmp_path):
    pid = table.start("sleeper", ["sleep", "100"], tmp_path / "log")
    assert table.alive()["sleeper"].pid == pid
    table.stop(["sleeper"], grace_seconds=5)
    assert table.alive() == {}
    assert table.recorded() == []


def test_a_stale_pid_file_is_never_killed(table):
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        ticks = start_ticks_of(stranger.pid)
        write_record(table, "reused-id", stranger.pid, ticks - 1)
        assert table.alive() == {}
        table.stop(["reused-id"], grace_seconds=0)
        assert stranger.poll() is None
        assert table.recorded() == []
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_without_the_mark_survives_the_sweep(table):
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        assert stranger.pid not in table.sweep()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_whose_record_was_lost_is_found_by_its_mark(table, tmp_path):
    pid = table.start("forgotten", ["sleep", "100"], tmp_path / "log")
    (table.folder / "forgotten.json").unlink()
    wait_for(lambda: pid in table.marked())
    assert table.sweep() == [pid]
    assert start_ticks_of(pid) is None


def test_what_a_marked_process_starts_is_marked_too(table, tmp_path):
    table.start("parent", ["sh", "-c", "sleep 100 & wait"], tmp_path / "log")
    wait_for(lambda: len(table.marked()) == 2)


def test_the_mark_of_another_cluster_does_not_count(table, tmp_path):
    other = ProcessTable(tmp_path / "other", tmp_path / "elsewhere")
    pid = other.start("theirs", ["sleep", "100"], tmp_path / "log")
    try:
        wait_for(lambda: pid in other.marked())
        assert pid not in table.marked()
    finally:
        other.sweep()


def test_a_process_that_ignores_the_polite_signal_is_killed_after_its_grace(table, tmp_path):
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    log = tmp_path / "log"
    pid = table.start("deaf", [sys.executable, "-c", script], log)
    wait_for(lambda: "deaf" in log.read_text())
    began = time.monotonic()
    table.stop(["deaf"], grace_seconds=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    assert start_ticks_of(pid) is None


def test_a_record_cut_short_by_a_crash_is_left_out(table):
    table.folder.mkdir(parents=True)
    (table.folder / "half.json").write_text('{"pid": 12')
    assert table.recorded() == []


def test_an_ended_process_is_reported_with_the_end_of_its_log(table, tmp_path):
    table.start("brief", ["sh", "-c", "echo it broke; exit 3"], tmp_path / "log")
    wait_for(lambda: "brief" not in table.alive())
    assert "it broke" in table.require_alive("brief")
    assert "never started" in table.require_alive("unknown")


def test_a_zombie_does_not_count_as_running():
    child = subprocess.Popen(["true"])
    try:
        wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        assert start_ticks_of(child.pid) is None
    finally:
        child.wait()


def test_ending_an_id_that_nobody_has_is_no_error():
    end_processes([Recorded("gone", 2**22 - 1, 5)], grace_seconds=1)


def test_this_process_is_alive_by_its_own_start_time():
    assert is_alive(Recorded("me", os.getpid(), start_ticks_of(os.getpid())))


def test_the_tail_of_a_log_fits_on_a_screen(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(["x" * 1000] * 100))
    assert len(tail(log, lines=3)) == 3 * 300 + 2
    assert tail(tmp_path / "none") == "(no log)"
