"""Real processes, really stopped and killed: what is committed, which code comes out, how soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.run import CheckpointManifest
from lora_trainer import checkpoint
from tests.trainer.jobs import Job, await_true, make_pictures

LAUNCH = [sys.executable, "-m", "lora_trainer.launch"]
TRAIN = ["-m", "lora_trainer", "train"]
TWO_RANKS = ["--standalone", "--nproc-per-node=2"]
END_SECONDS = 10.0  # what a pod may take between SIGTERM and its end, on a tiny model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"), [(64, 64)] * 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    model = tiny_model_folder("zimage")
    return Job(tmp_path / "job", model, data, cache, train={"steps": 100_000}, save={"save_every": 1000})


class Process:
    """A launcher and what it started."""

    def __init__(self, job: Job, *arguments: str, command: list[str] | None = None) -> None:
        self.job = job
        line = command or [*LAUNCH, *arguments, *TRAIN]
        environment = job.environment()
        with (job.folder / "log").open("ab") as log:
            self.popen = subprocess.Popen(line, env=environment, stderr=log, cwd=job.folder)

    def await_step(self, step: int, start: int = 1) -> None:
        def reached() -> bool:
            assert self.popen.poll() is None, (self.job.folder / "log").read_text()[-3000:]
            if self.job.store.get(layout.PROGRESS) is None:
                return False
            progress = self.job.progress()
            return progress.start >= start and progress.step >= step

        await_true(reached, f"step {step}")

    def worker(self, rank: int = 0) -> int:
        """Process id of a rank."""
        for pid in Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split():
            if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
                return int(pid)
        raise AssertionError(f"no rank {rank}")

    def end(self, number: int | None, seconds: float) -> int:
        """Exit code after a signal, which must come within some seconds."""
        if number is not None:
            self.popen.send_signal(number)
        begin = time.monotonic()
        code = self.popen.wait(240)
        assert time.monotonic() - begin < seconds
        return code


def test_a_killed_run_goes_on_from_its_checkpoint_and_a_stopped_one_commits_one(job):
    job.change(save={"save_every": 4})
    first = Process(job)
    first.await_step(6)
    os.kill(first.worker(), signal.SIGKILL)
    assert first.end(None, END_SECONDS) == 128 + signal.SIGKILL
    assert "SIGKILL" in job.word().message
    committed, reached = job.steps()[-1], job.progress().step

    second = Process(job)
    second.await_step(committed + 2, start=2)
    assert second.end(signal.SIGTERM, END_SECONDS) == ExitCode.PREEMPTED
    word, progress = job.word(), job.progress()
    assert job.steps()[-1] == word.step >= committed + 2
    assert progress.exit == word
    assert progress.resumed_from_step == committed
    assert progress.lost_steps == max(0, reached - committed)


def test_a_signal_during_the_imports_ends_with_85_and_nothing_to_save(job):
    process = Process(job, command=[sys.executable, *TRAIN])
    await_true(lambda: job.store.get(layout.PROGRESS) is not None, "the first heartbeat")
    assert job.progress().stage == "Initializing"
    assert process.end(signal.SIGTERM, END_SECONDS) == ExitCode.PREEMPTED
    assert job.word().message.endswith("nothing was to be saved")
    assert job.steps() == []


def adapter_at(job: Job, step: int) -> dict[str, torch.Tensor]:
    for item in job.store.list(layout.CHECKPOINTS):
        if layout.is_checkpoint_manifest(item.key):
            manifest = CheckpointManifest.model_validate_json(job.store.get(item.key) or b"")
            if manifest.step == step:
                folder = item.key.removesuffix(layout.MANIFEST)
                return load(job.store.get(folder + checkpoint.ADAPTER) or b"")
    raise AssertionError(f"no checkpoint of step {step}")


def test_two_ranks_of_two_train_what_one_process_of_four_does_and_stop_together(job):
    job.change(train={"batch_size": 2})
    process = Process(job, *TWO_RANKS)
    process.await_step(3)
    assert process.end(signal.SIGTERM, END_SECONDS) == ExitCode.PREEMPTED
    step = job.word().step
    assert job.steps() == [step]
    alone = job.copy("alone").change(train={"batch_size": 4, "steps": step})
    assert alone.run() == ExitCode.DONE
    expected = adapter_at(alone, step)
    # the gradients of two ranks are summed in another order: each update differs by rounding, and Adam divides by it
    for key, tensor in adapter_at(job, step).items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6 * step, rtol=1e-3)


def test_when_rank_0_can_not_commit_both_ranks_end_with_the_store_s_word(job):
    job.change(save={"save_every": 2})
    job.folder.mkdir(parents=True)
    job.store.put("checkpoints", b"a file where a folder should be")
    process = Process(job, *TWO_RANKS)
    assert process.end(None, 240) == ExitCode.TRANSIENT
    assert "checkpoints" in job.word().message
    assert "can't be written" in job.word().message
    log = (job.folder / "log").read_text()
    assert "[rank 1] rank 0 could not commit a checkpoint" in log
    assert (job.word().step, job.progress().exit.step) == (0, 0)


def test_when_one_of_two_ranks_is_killed_the_group_ends_within_seconds(job):
    process = Process(job, *TWO_RANKS)
    process.await_step(2)
    os.kill(process.worker(1), signal.SIGKILL)
    assert process.end(None, 2 * END_SECONDS) == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in job.word().message
    assert job.progress().exit.code == ExitCode.TRANSIENT
