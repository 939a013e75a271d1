"""The launcher: what it starts, and which end explains the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_trainer.launch import Outcome, ranks_started, read_words, root_cause, shutdown_seconds, single_process_command

TRAIN = ["-m", "lora_trainer", "train"]


# ---------------------------------------------------------------------- what is started
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--standalone"],
        ["--nnodes=1", "--nproc-per-node=1", "--node-rank=0", "--master-addr=h", "--master-port=29500"],
        ["--nnodes", "1:1", "--nproc_per_node", "1", "--max-restarts=0"],
    ],
)
def test_one_process_on_one_node_needs_no_agent(arguments):
    assert single_process_command([*arguments, *TRAIN], {}) == [sys.executable, "-u", *TRAIN]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--nproc-per-node=2"], {}),
        (["--nnodes=2"], {}),
        (["--nproc-per-node=auto"], {}),
        (["--max-restarts=3"], {}),
        (["--tee=3"], {}),
        ([], {"PET_NPROC_PER_NODE": "2"}),
    ],
)
def test_anything_else_is_torchrun_s(arguments, variables):
    assert single_process_command([*arguments, *TRAIN], variables) is None


def test_the_module_s_own_arguments_are_passed_on_as_they_stand():
    command = single_process_command(["-m", "lora_trainer", "train", "--run-config", "--nnodes=2"], {})
    assert command[-2:] == ["--run-config", "--nnodes=2"]


# ---------------------------------------------------------------------- which end counts
def word(code, step=0):
    return {"code": code, "reason": "R", "message": f"said {code}", "step": step}


@pytest.mark.parametrize(
    ("codes", "words", "expected"),
    [
        ({}, {0: word(0), 1: word(0)}, 0),
        ({0: 75, 1: 65}, {0: word(75), 1: word(65)}, 65),  # rank 0 only heard of rank 1's end
        ({0: 75, 1: -9}, {0: word(75)}, 137),
        ({0: 85, 1: 86}, {0: word(85), 1: word(86)}, 86),
        ({0: 85, 1: 85}, {0: word(85), 1: word(85)}, 85),
        ({0: 64, 1: -15}, {0: word(64)}, 64),  # rank 1 was told to stop while it was importing
        ({0: 75, 1: 1}, {0: word(75), 1: word(1)}, 1),
        ({0: -11}, {}, 139),
        ({0: 3}, {0: word(0)}, 3),  # it crashed after its word
    ],
)
def test_the_code_is_that_of_the_worker_that_explains_the_others(codes, words, expected):
    assert root_cause(Outcome(codes), words)["code"] == expected


def test_a_signal_before_any_worker_began_is_a_preemption():
    assert root_cause(Outcome({}, "SIGTERM"), {})["code"] == 85
    assert root_cause(Outcome({0: -15}, "SIGTERM"), {})["code"] == 85


def test_a_worker_that_outlived_the_grace_period_is_not_called_saved():
    cause = root_cause(Outcome({}, "SIGTERM"), {0: word(85, 7)}, frozenset({0, 1}))
    assert cause["code"] == 137
    assert "rank 1 did not save within" in cause["message"]
    assert cause["step"] == 7


def test_words_that_can_t_be_read_count_as_none(tmp_path):
    (tmp_path / "rank-0.json").write_text(json.dumps(word(85)))
    (tmp_path / "rank-1.json").write_text('{"code":')
    (tmp_path / "rank-2.json").write_text('{"code": null}')
    (tmp_path / "rank-3.started").touch()
    assert set(read_words(tmp_path)) == {0}
    assert ranks_started(tmp_path) == {3}


def test_the_grace_period_leaves_the_launcher_a_moment():
    assert shutdown_seconds({"LORA_GRACE_SECONDS": "120"}) == 117
    assert shutdown_seconds({"LORA_GRACE_SECONDS": "2"}) == 1


# ---------------------------------------------------------------------- the supervised worker, for real
WORKER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def leave(number, frame):
    (folder / "heard").write_text(signal.Signals(number).name)
    os._exit(85)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
(folder / "pid").write_text(str(os.getpid()))
if len(sys.argv) > 2: sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


def launch(tmp_path, *arguments, worker=WORKER) -> subprocess.Popen:
    (tmp_path / "worker.py").write_text(worker)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "LORA_TERMINATION_LOG": str(tmp_path / "log")}
    command = [sys.executable, "-m", "lora_trainer.launch", "-m", "worker", str(tmp_path), *arguments]
    return subprocess.Popen(command, env=env)


def wait_for(path: Path, seconds=30.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear within {seconds} s")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_reach_the_worker_and_its_code_comes_back(tmp_path, name):
    process = launch(tmp_path)
    wait_for(tmp_path / "pid")
    process.send_signal(getattr(signal, name))
    assert process.wait(30) == 85
    assert (tmp_path / "heard").read_text() == name


def test_a_worker_killed_from_outside_is_137_and_the_termination_log_says_so(tmp_path):
    process = launch(tmp_path)
    os.kill(int(wait_for(tmp_path / "pid")), signal.SIGKILL)
    assert process.wait(30) == 137
    said = json.loads((tmp_path / "log").read_text())
    assert said["code"] == 137
    assert "SIGKILL" in said["message"]


ORPHAN = """
import os, pathlib, sys, time
from lora_trainer.stopping import STOP, Stopped, follow_launcher
STOP.install()
follow_launcher()
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(60)
except Stopped as stopped:
    (folder / "heard").write_text(str(stopped))
"""


def test_no_worker_outlives_a_launcher_that_was_killed(tmp_path):
    process = launch(tmp_path, worker=ORPHAN)
    wait_for(tmp_path / "pid")
    process.kill()
    process.wait()
    assert wait_for(tmp_path / "heard") == "SIGTERM"


@pytest.mark.parametrize("code", [0, 64, 75])
def test_the_worker_s_own_code_is_the_launcher_s(tmp_path, code):
    assert launch(tmp_path, str(code)).wait(30) == code
