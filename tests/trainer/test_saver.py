"""Saving in the background: training goes on, and what is committed is what was trained at that step, to the bit."""

from __future__ import annotations

import threading

import pytest
import torch

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.store import StoreCredentialsError, StoreError
from lora_api.stores import DirectoryStore
from lora_trainer import checkpoint, retry, saver
from lora_trainer.errors import FencedError, TransientError
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import Group
from lora_trainer.saver import Saver, Saves, Saving, Snapshot
from tests.trainer.jobs import Job, make_pictures

NETWORKS = {
    "lora": {"type": "lora", "linear": 2},
    "loha": {"type": "loha", "linear": 2},  # its checkpoint holds one more file, which is computed
}
TRAINING = {"steps": 8, "lr": 3e-3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"), [(64, 64)] * 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    return Job(tmp_path / "whole", tiny_model_folder("zimage"), data, cache, train=TRAINING)


class SlowStore:
    """Holds the checkpoint of one step back until somebody waits for it, or lets it pass."""

    def __init__(self, monkeypatch, step: int) -> None:
        self.may_pass, self.arrived = threading.Event(), threading.Event()
        folder, put, wait = layout.checkpoint_folder(step, 1), DirectoryStore.put, Saver.wait

        def slow_put(store, key, content):
            if key.startswith(folder):
                self.arrived.set()
                assert self.may_pass.wait(120)
            put(store, key, content)

        def patient_wait(saver):
            self.may_pass.set()
            return wait(saver)

        monkeypatch.setattr(DirectoryStore, "put", slow_put)
        monkeypatch.setattr(Saver, "wait", patient_wait)


def files_of_step(job: Job, step: int, start: int = 1) -> dict[str, bytes]:
    folder = layout.checkpoint_folder(step, start)
    names = [item.key.removeprefix(folder) for item in job.store.list(folder)]
    return {name: job.store.get(folder + name) for name in names if name != layout.MANIFEST}


# ---------------------------------------------------------------------- the bits
@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_committed_late_is_what_was_trained_at_its_step(job, network, monkeypatch):
    job.config["network"] = NETWORKS[network]
    assert job.run() == ExitCode.DONE
    expected = files_of_step(job, 3)
    assert len(expected) == (3 if network == "lora" else 4)

    late = job.copy("late")
    slow = SlowStore(monkeypatch, 3)
    committed = []

    def look(session, step):
        if step > 3:
            assert slow.arrived.wait(120)
        committed.append((step, late.steps(), session.start.committed_step, session.start.reporter.now.committed_step))

    assert late.run(hook=look) == ExitCode.DONE
    assert committed[3:6] == [(4, [], 0, 0), (5, [], 0, 0), (6, [], 0, 0)], "three updates were made meanwhile"
    assert files_of_step(late, 3) == expected
    assert late.steps() == [3, 6, 8]
    assert files_of_step(late, 8) == files_of_step(job, 8)


def test_a_checkpoint_that_is_due_before_the_last_is_committed_waits_and_says_so(job, monkeypatch, caplog):
    SlowStore(monkeypatch, 3)
    monkeypatch.setattr(saver, "WORTH_SAYING_SECONDS", 0.0)
    assert job.run() == ExitCode.DONE
    assert job.steps() == [3, 6, 8]
    assert "step 6 could be saved only when step 3 was committed: training waited" in caplog.text


def test_a_stop_while_a_checkpoint_is_in_flight_commits_both(job, monkeypatch):
    SlowStore(monkeypatch, 3)
    assert job.run(stop_after=4) == ExitCode.PREEMPTED
    assert job.steps() == [3, 4]
    assert job.word().step == 4


def test_an_error_while_a_checkpoint_is_in_flight_does_not_lose_it(job, monkeypatch):
    SlowStore(monkeypatch, 3)
    assert job.run(crash_after=4) == 1
    assert job.steps() == [3]
    assert job.word().step == 3


# ---------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    ("error", "code"),
    [(StoreError("the store is away"), ExitCode.TRANSIENT), (StoreCredentialsError("refused"), ExitCode.CREDENTIALS)],
)
def test_a_commit_that_fails_ends_the_start_with_its_own_word(job, monkeypatch, error, code):
    from lora_trainer import train

    put, committed = DirectoryStore.put, []

    def failing(store, key, content):
        if key.startswith(layout.checkpoint_folder(6, 1)):
            committed.append(store.list(layout.CHECKPOINTS))
            raise error
        put(store, key, content)

    monkeypatch.setattr(train, "RetryingStore", lambda store: retry.RetryingStore(store, (0.0, 0.0)))
    monkeypatch.setattr(DirectoryStore, "put", failing)
    job.change(train={"steps": 100_000}, save={"save_every": 3})
    assert job.run() == code
    assert len(committed) == (3 if code == ExitCode.TRANSIENT else 1)
    assert job.word().message == str(error)
    assert (job.word().step, job.progress().exit.step) == (3, 3)
    assert job.steps() == [3]


def test_a_newer_start_ends_the_older_one_whose_checkpoint_is_in_flight(job, monkeypatch):
    from lora_trainer.fence import Fence

    slow = SlowStore(monkeypatch, 3)

    def take_over(session, step):
        if step == 5:
            Fence.raise_up(job.store, attempt=2)
            slow.may_pass.set()

    assert job.change(train={"steps": 100_000}, save={"save_every": 3}).run(hook=take_over) == ExitCode.TRANSIENT
    assert "start 2 has taken over" in job.word().message
    assert job.steps() == []


# ---------------------------------------------------------------------- other ranks
class TwoRanks(Group):
    """Rank 1 of two, who is told what rank 0 says."""

    def __init__(self, *answers: Saving) -> None:
        super().__init__(1, 2, torch.device("cpu"))
        self.answers = list(answers)

    def broadcast(self, value):
        assert value is None
        return self.answers.pop(0)


def other_rank(*answers: Saving) -> tuple[Saves, list[int]]:
    heard: list[int] = []
    return Saves(None, TwoRanks(*answers), Reporter(None, 0, 0), 2, heard_of_commit=heard.append), heard


def test_another_rank_waits_for_nothing_and_counts_a_step_only_when_it_is_committed():
    saves, heard = other_rank()
    saves.save(4, lambda: None)
    saves.heard(Saving.BUSY)
    assert heard == []
    saves.heard(Saving.IDLE)
    assert (heard, saves.committed_step) == ([4], 4)
    saves.save(6, lambda: None)  # broadcasts nothing: there are no answers


def test_another_rank_waits_when_all_know_that_the_save_before_is_in_flight():
    saves, heard = other_rank(Saving.IDLE, Saving.IDLE)
    saves.save(4, lambda: None)
    saves.heard(Saving.BUSY)
    saves.save(6, lambda: None)
    assert heard == [4]
    saves.finish()
    assert heard == [4, 6]


@pytest.mark.parametrize("when", ["in the loop", "at the next save", "at the end"])
def test_another_rank_ends_when_rank_0_could_not_commit(when):
    saves, heard = other_rank(Saving.FAILED)
    saves.save(4, lambda: None)
    if when != "in the loop":
        saves.heard(Saving.BUSY)
    end = {
        "in the loop": lambda: saves.heard(Saving.FAILED),
        "at the next save": lambda: saves.save(6, lambda: None),
        "at the end": saves.finish,
    }
    with pytest.raises(TransientError, match="rank 0 could not commit"):
        end[when]()
    assert heard == []


def test_rank_0_brings_in_what_its_reporter_found_out(tmp_path):
    saves = Saves(None, Group(0, 1, torch.device("cpu")), Reporter(None, 0, 0), 0, heard_of_commit=lambda step: None)
    assert saves.state is Saving.IDLE
    saves.reporter.fenced = FencedError("start 2")
    assert saves.state is Saving.FAILED
    with pytest.raises(FencedError, match="start 2"):
        saves.heard(Saving.FAILED)


def test_a_failure_while_files_are_made_is_a_failure_of_the_commit(tmp_path):
    from lora_trainer.fence import Fence

    def broken():
        raise MemoryError("no room")

    store = DirectoryStore(tmp_path)
    made = Saver(store, Fence.raise_up(store, 1), "u1", "hash", committed=lambda manifest: None)
    made.begin(Snapshot(4, broken, 0.0))
    assert made.wait() is Saving.FAILED
    assert isinstance(made.failure, MemoryError)
    assert checkpoint.newest(store) == (None, ())
