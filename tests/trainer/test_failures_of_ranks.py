"""One of two ranks fails: both are gone within seconds, and the launcher leaves with the word of the one that failed.

Real processes under the launcher. The fault comes from a family of another package (`faulty/`), as any model's could.
"""

from __future__ import annotations

import json
import os
import threading

import pytest

from lora_api.exit_codes import ExitCode
from lora_trainer.peers import PeerWatch, lost_peer
from tests.trainer.jobs import ROOT, Job, make_pictures
from tests.trainer.ranks import log_of, run_on_two_ranks

SITE = str(ROOT / "tests" / "trainer" / "faulty")
NEVER = "600"  # seconds of grace: a rank that only the launcher could end would be noticed


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_model_folder):
    data = make_pictures(tmp_path_factory.mktemp("data"), [(64, 64)] * 4)
    root, cache = tmp_path_factory.mktemp("jobs"), tmp_path_factory.mktemp("cache")

    def job(name: str, **changes) -> Job:
        train = {"steps": 1000, "batch_size": 2}
        made = Job(root / name, tiny_model_folder("zimage"), data, cache, "x-faulty", train=train)
        return made.change(**changes)

    return job


def fails(job: Job, fault: str) -> tuple[int, str]:
    """Exit code and message of the launcher."""
    code = run_on_two_ranks(job, FAULT=fault, PYTHONPATH=SITE, LORA_GRACE_SECONDS=NEVER)
    word = job.word()
    assert word.code == code, log_of(job)[-3000:]
    return code, word.message


def test_out_of_memory_on_one_rank_is_told_with_the_step_and_the_batch(make):
    code, message = fails(make("memory"), "1:forward:3:oom")
    assert code == ExitCode.OUT_OF_MEMORY
    assert message.startswith(
        "out of device memory while training step 3, forward pass of 2 pictures of 64 x 64: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert "halve train.batch_size and double train.gradient_accumulation" in message


def test_it_is_told_from_a_sharded_rank_too_and_while_the_other_waits_for_something_else(make):
    """Rank 0 hangs where no collective will ever wake it, as in a kernel that waits for a peer's memory."""
    job = make("stalled", train={"parallelism": "fsdp"})
    code, message = fails(job, "1:forward:2:oom,0:batch:2:stall")
    assert code == ExitCode.OUT_OF_MEMORY
    assert "step 2, forward pass" in message
    assert "rank 1 ended with code 86" in log_of(job)
    assert "this rank waited for it" in job.progress().exit.message


def test_data_that_one_rank_can_not_use_is_the_reason_for_both(make):
    code, message = fails(make("data"), "1:batch:2:data")
    assert (code, message) == (ExitCode.DATA, "datasets/7.png: is not a picture")


def test_an_error_nobody_foresaw_on_one_rank_is_the_reason_for_both(make):
    job = make("surprise")
    assert fails(job, "1:load:1:error") == (1, "KeyError: 'surprise'")
    assert "Traceback" in log_of(job)


# ---------------------------------------------------------------------- seeing that another rank is gone
def mark(folder, rank, pid):
    (folder / f"rank-{rank}.started").write_text(str(pid))


def leave_word(folder, rank, code):
    (folder / f"rank-{rank}.json").write_text(json.dumps({"code": code, "message": "said so"}))


def test_ranks_that_live_or_end_in_order_are_not_lost(tmp_path):
    mark(tmp_path, 0, os.getpid())
    mark(tmp_path, 1, os.getpid())
    assert lost_peer(tmp_path, 0) is None
    for code in (0, 85):
        leave_word(tmp_path, 1, code)
        assert lost_peer(tmp_path, 0) is None


def test_a_rank_that_left_another_word_or_none_is_lost(tmp_path):
    processes = tmp_path / "proc"
    for pid, state in ((11, "S"), (12, "Z")):
        (processes / str(pid)).mkdir(parents=True)
        (processes / str(pid) / "stat").write_text(f"{pid} (python) (x)) {state} 1 1")
    mark(tmp_path, 0, 1)
    mark(tmp_path, 1, 11)
    assert lost_peer(tmp_path, 0, processes) is None
    mark(tmp_path, 1, 12)
    assert lost_peer(tmp_path, 0, processes) == "rank 1 is gone without a word"
    mark(tmp_path, 1, 13)
    assert lost_peer(tmp_path, 0, processes) == "rank 1 is gone without a word"
    assert lost_peer(tmp_path, 0, tmp_path / "no-such-system") is None
    leave_word(tmp_path, 1, 86)
    assert lost_peer(tmp_path, 0, processes) == "rank 1 ended with code 86: said so"


def test_a_rank_that_ends_by_itself_or_is_committing_is_left_alone(tmp_path, monkeypatch):
    from lora_trainer import peers

    monkeypatch.setattr(peers, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(peers, "_PATIENCE_SECONDS", 0.002)
    mark(tmp_path, 1, os.getpid())
    leave_word(tmp_path, 1, 86)
    said = []
    asked = threading.Event()
    watch = PeerWatch(tmp_path, 0, said.append)
    watch.saves = lambda: (asked.set(), True)[1]
    watch.start()
    assert asked.wait(30)
    watch.close()
    assert said == []
    other = PeerWatch(tmp_path, 0, lambda lost: (said.append(lost), other.close()))
    other.start()
    assert other._closed.wait(30)
    assert said == ["rank 1 ended with code 86: said so"]
