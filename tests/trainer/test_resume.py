"""Interrupted anywhere and resumed: the same bits as never interrupted."""

from __future__ import annotations

import json

import pytest

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_trainer import checkpoint
from lora_trainer.session import Session
from tests.trainer.jobs import Crash, Job, make_pictures

NETWORKS = {
    "lora": {"type": "lora", "linear": 2, "linear_alpha": 4, "dropout": 0.1},
    "lokr": {"type": "lokr", "linear": 2, "lokr_factor": 4},
}
TRAINING = {"steps": 8, "gradient_accumulation": 2, "lr_scheduler": "cosine", "warmup_steps": 2, "lr": 3e-3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    def make(arch="zimage", network="lora", **changes) -> Job:
        job = Job(tmp_path / "whole", tiny_model_folder(arch), data, cache, arch, train={"dtype": "fp32"} | TRAINING)
        job.config["network"] = NETWORKS[network]
        job.config["datasets"][0]["caption_dropout"] = 0.3
        return job.change(**changes)

    return make


def same_training(one: Job, other: Job) -> bool:
    """Equal adapter and optimizer, to the bit, and an equal final file."""
    first, second = one.newest(), other.newest()
    names = (checkpoint.ADAPTER, checkpoint.OPTIMIZER)
    final = layout.FINAL + "adapter.safetensors"
    tensors = [store.get(final).split(b"}", 1)[1][-2000:] for store in (one.store, other.store)]
    return all(first[name] == second[name] for name in names) and tensors[0] == tensors[1]


@pytest.mark.parametrize("network", NETWORKS)
def test_three_interruptions_in_a_row_change_no_bit(job, arch, network):
    """A crash before the first checkpoint, a stop between two, a crash right after one."""
    whole = job(arch, network)
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(crash_after=2) == 1
    assert broken.run(stop_after=4) == ExitCode.PREEMPTED
    assert broken.run(crash_after=6) == 1
    assert broken.run() == ExitCode.DONE
    assert broken.steps() == [3, 4, 6, 8]
    assert same_training(whole, broken)
    progress = broken.progress()
    assert (progress.start, progress.resumed_from_step, progress.lost_steps) == (4, 6, 2)


def test_a_stop_after_any_step_changes_no_bit(job):
    whole = job()
    assert whole.run() == ExitCode.DONE
    for step in (1, 3, 7):
        broken = whole.copy(f"broken-{step}")
        assert broken.run(stop_after=step) == ExitCode.PREEMPTED
        assert broken.word().step == step
        assert broken.run() == ExitCode.DONE
        assert same_training(whole, broken)


def test_the_comparison_would_notice_a_lost_optimizer_state(job, monkeypatch):
    whole = job()
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(stop_after=4) == ExitCode.PREEMPTED
    from lora_trainer import session
    from lora_trainer.optimizers import build_optimizer
    from lora_trainer.state import unpack

    def forgetful(files, adapter, optimizer, *others):
        return unpack(files, adapter, build_optimizer(adapter.parameters(), session_config), *others)

    session_config = session.RunConfig.model_validate_json((broken.folder / "run.json").read_text()).config.train
    monkeypatch.setattr(session, "unpack", forgetful)
    assert broken.run() == ExitCode.DONE
    assert not same_training(whole, broken)


def test_a_truncated_newest_checkpoint_is_reported_and_the_one_before_gives_the_same_end(job):
    whole = job()
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(crash_after=7) == 1
    key = layout.checkpoint_folder(6, 1) + checkpoint.OPTIMIZER
    broken.store.put(key, broken.store.get(key)[:-1])
    assert broken.run() == ExitCode.DONE
    progress = broken.progress()
    assert [item.step for item in progress.rejected] == [6]
    assert (progress.resumed_from_step, progress.lost_steps) == (3, 4)
    assert same_training(whole, broken)


def test_when_no_checkpoint_can_be_trusted_it_ends_with_66_and_the_list(job):
    broken = job()
    assert broken.run(crash_after=7) == 1
    for step in (3, 6):
        broken.store.put(layout.checkpoint_folder(step, 1) + checkpoint.ADAPTER, b"")
    assert broken.run() == ExitCode.CHECKPOINT_INTEGRITY
    assert "step-000000003" in broken.word().message
    assert "step-000000006" in broken.word().message
    assert broken.progress().start == 1  # nothing was reported over the good numbers


def test_a_start_that_should_be_dead_commits_nothing_and_leaves_the_report_to_the_newer_one(job):
    old = job(save={"save_every": 2})

    def take_over(session: Session, step: int) -> None:
        if step == 4:
            from lora_trainer.fence import Fence

            Fence.raise_up(old.store, attempt=2)
            old.store.put(layout.PROGRESS, b"the newer start's")

    assert old.run(hook=take_over) == ExitCode.TRANSIENT
    assert "start 2 has taken over" in old.word().message
    assert old.steps() == [2]


def test_a_finished_job_ends_at_once_with_0(job):
    done = job()
    assert done.run() == ExitCode.DONE
    before = [item.key for item in done.store.list()]
    assert done.run() == ExitCode.DONE
    assert [item.key for item in done.store.list()] == before


def test_steps_and_rate_changed_by_control_hold_from_the_next_step_on_and_across_a_resume(job, monkeypatch):
    from lora_trainer.control import ControlWatch, read_control

    def read_now(watch, generation):
        found = read_control(watch._store)
        return found if found is not None and found.generation > generation else None

    def change(session: Session, step: int) -> None:
        if step == 3:
            control = {"generation": 2, "steps": 10, "lr": 1e-2, "saveEvery": 4, "maxStepSaves": 2}
            session.store.put(layout.CONTROL, json.dumps(control).encode())

    monkeypatch.setattr(ControlWatch, "newer_than", read_now)  # without waiting for the watching thread
    whole = job()
    assert whole.run(hook=change) == ExitCode.DONE
    assert whole.steps() == [3, 8, 10]
    assert [line["control"]["generation"] for line in whole.metrics() if "control" in line] == [2]
    rates = {line["step"]: line["lr"] for line in whole.metrics() if "lr" in line}
    assert rates[5] > 2 * rates[4]
    broken = whole.copy("broken")
    assert broken.run(hook=change, crash_after=9) == 1
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)
    state = json.loads(broken.newest()[checkpoint.STATE])
    found = {name: state["control"][name] for name in ("generation", "steps", "lr", "save_every", "max_step_saves")}
    assert found == {"generation": 2, "steps": 10, "lr": 1e-2, "save_every": 4, "max_step_saves": 2}


def test_the_crash_used_here_is_a_plain_failure(job):
    broken = job()
    assert broken.run(crash_after=1) == 1
    assert broken.word().message.startswith(Crash.__name__)
