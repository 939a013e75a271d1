"""A run that was made smaller trains the same samples with the same noise, and goes on from the same checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load

from lora_api.exit_codes import ExitCode
from lora_api.run import ExitWord, Progress, RunConfig
from lora_trainer import checkpoint
from lora_trainer.commandline import smaller
from lora_trainer.commandline.rundir import document_of, shrunk_before, write_run_config
from lora_trainer.data.sampler import BatchOrder
from lora_trainer.data.stream import BatchMaker, MicroBatch, Share
from lora_trainer.objective import Objective
from tests import cramped_family
from tests.trainer.jobs import ROOT, Job, make_pictures
from tests.trainer.test_loop import Numbers, config

BUCKETS = ["wide"] * 2 + ["tall"] * 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"))


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, tmp_path_factory):
    def make(**train) -> Job:
        cache = tmp_path_factory.getbasetemp() / "cache"
        settings = {"dtype": "fp32", "steps": 6, "batch_size": 4, "gradient_accumulation": 2, "lr": 3e-3} | train
        job = Job(tmp_path / "whole", tiny_model_folder("zimage"), data, cache, train=settings)
        job.config["datasets"][0]["caption_dropout"] = 0.3
        return job.change(save={"save_every": 2})

    return make


def shrunk(job: Job, times: int) -> Job:
    job.document["shrunk"] = times
    return job


# ---------------------------------------------------------------------- what is trained
def made(model, pieces: int, rank: int = 0) -> list[MicroBatch]:
    """Everything a rank of two trains in three iterations of two batches of four."""
    share = Share(4, 2, rank, 2, pieces=pieces)
    order = BatchOrder(BUCKETS, share.global_batch, seed=7)
    maker = BatchMaker(Numbers(model, 16), order, model, share, Objective.of(config(seed=7).train, model))
    return [maker.make(iteration, number) for iteration in range(3) for number in range(share.passes)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_are_the_batches_cut_up_whatever_the_buckets(load_tiny, pieces, rank):
    model = load_tiny("zimage")
    whole, cut = made(model, 1, rank), made(model, pieces, rank)
    assert len(cut) == pieces * len(whole)
    for name in ("x_t", "target", "time"):
        expected = torch.cat([getattr(batch, name) for batch in whole])
        assert torch.equal(torch.cat([getattr(batch, name) for batch in cut]), expected), name
    size = 4 // pieces
    assert [batch.slot for batch in cut] == [batch.slot + size * n for batch in whole for n in range(pieces)]


def largest_difference(one: Job, other: Job) -> float:
    first, second = (load(job.newest()[checkpoint.ADAPTER]) for job in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_run_made_smaller_midway_ends_where_the_whole_one_does(job, times):
    whole = job()
    assert whole.run() == ExitCode.DONE
    smaller = whole.copy("smaller")
    assert smaller.run(crash_after=3) == 1
    begun = load(smaller.newest()[checkpoint.ADAPTER])
    assert shrunk(smaller, times).run() == ExitCode.DONE, smaller.word()
    assert smaller.progress().resumed_from_step == 2
    ended = load(smaller.newest()[checkpoint.ADAPTER])
    moved = max(float((begun[name] - ended[name]).abs().max()) for name in begun)
    assert moved > 1e-3
    assert largest_difference(whole, smaller) < 0.02 * moved, "the sums are taken in another order, that is all"


def test_every_stage_of_a_run_made_smaller_trains_what_it_did(job):
    stages = [{"steps": 2}, {"steps": 2, "batch_size": 3, "gradient_accumulation": 1}]
    whole = job(steps=4, stages=stages)
    assert whole.run() == ExitCode.DONE
    smaller = shrunk(whole.copy("smaller"), 1)
    assert smaller.run() == ExitCode.DONE, smaller.word()
    before, after = ([line["loss"] for line in each.metrics() if "loss" in line] for each in (whole, smaller))
    assert after == pytest.approx(before, rel=1e-4)
    assert largest_difference(whole, smaller) < 1e-4


def test_a_smaller_run_that_is_interrupted_changes_no_bit(job):
    whole = shrunk(job(), 2)
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(crash_after=3) == 1
    assert broken.run(stop_after=5) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert whole.newest() == broken.newest() | {checkpoint.STATE: whole.newest()[checkpoint.STATE]}


def test_the_speed_and_the_samples_of_a_step_are_told_as_before(job):
    lines = {}
    for times in (0, 2):
        each = shrunk(job(steps=2).copy(f"times-{times}"), times)
        assert each.run() == ExitCode.DONE
        lines[times] = [line["samples"] for line in each.metrics() if "samples" in line]
    assert lines[0] == lines[2] == [8, 16]


# ---------------------------------------------------------------------- how it is told
def test_out_of_memory_says_at_what_and_whether_smaller_steps_help(job, monkeypatch):
    from lora_trainer.families.zimage import ZImageModel

    def full(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nlong story")

    one = job(steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(ZImageModel, "velocity", full)
        assert one.run() == ExitCode.OUT_OF_MEMORY
    assert one.word().message.startswith("out of device memory while training step 1, forward pass of ")
    assert "CUDA out of memory. Tried to allocate 2 GiB; halve train.batch_size" in one.word().message
    assert one.word().shrink_helps is True
    monkeypatch.setattr(ZImageModel, "__init__", full)
    assert one.run() == ExitCode.OUT_OF_MEMORY
    assert one.word().message.startswith("out of device memory while loading the base model: ")
    assert one.word().shrink_helps is False
    assert one.progress().exit == one.word()


def test_samples_that_do_not_fit_are_left_out_and_the_adapter_is_there(job, monkeypatch, caplog):
    from lora_trainer import finalize

    def full(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(finalize, "draw_samples", full)
    one = job(steps=2).change(sample={"prompts": ["a"], "sample_every": 1})
    assert one.run() == ExitCode.DONE
    assert "no samples are drawn, out of device memory" in caplog.text
    assert one.store.get("final/adapter.safetensors")


def test_a_model_that_can_not_recompute_is_trained_as_it_is_unless_it_was_asked_to(job, monkeypatch, caplog):
    from lora_trainer.families.zimage import ZImageModel

    def unable(_model):
        raise ValueError("does not support gradient checkpointing")

    monkeypatch.setattr(ZImageModel, "enable_gradient_checkpointing", unable)
    assert shrunk(job(steps=1), 3).run() == ExitCode.DONE
    assert "can't recompute its activations" in caplog.text
    assert job(steps=1, gradient_checkpointing=True).copy("asked").run() != ExitCode.DONE


# ---------------------------------------------------------------------- the command line
@pytest.fixture
def command(tmp_path, tiny_model_folder, data):
    """Runs `train_lora.py` on a device of little memory: exit code and what it said."""

    def run(*more: str, **cramped: str) -> tuple[int, str]:
        flags = {
            "arch": "x-cramped", "base_model": tiny_model_folder("zimage"), "train_data": data, "device": "cpu",
            "output_dir": tmp_path / "out", "resolution": 64, "batch_size": 4, "rank": 2, "steps": 2, "mixed_precision": "no",
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        path = (
            cramped_family.install(tmp_path / "site") if not (tmp_path / "site").exists() else variables["PYTHONPATH"]
        )
        variables.update(PYTHONPATH=path, LORA_CACHE_DIR=str(tmp_path / "cache"), LORA_HEARTBEAT_SECONDS="0.1")
        program = [sys.executable, str(ROOT / "train_lora.py"), *words, *more]
        ended = subprocess.run(
            program, env=variables | cramped, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=300, check=False
        )
        return ended.returncode, ended.stderr

    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LORA_", "CRAMPED_"))}
    return run


def test_a_run_from_flags_makes_itself_smaller_until_it_fits(command, tmp_path):
    code, said = command(CRAMPED_MOST="2")
    assert code == 0, said
    assert "out of device memory while training step 1, forward pass of 4 pictures of " in said
    assert "CUDA out of memory. Tried to allocate 4 GiB" in said
    assert (
        "beginning again with batch_size 2 x gradient_accumulation 2 instead of batch_size 4 x gradient_accumulation 1"
        in said
    )
    assert (tmp_path / "out" / "final" / "adapter.safetensors").is_file()
    assert json.loads((tmp_path / "out" / "run-config.json").read_text())["shrunk"] == 1


def test_a_run_from_flags_that_can_not_fit_ends_with_advice(command):
    code, said = command("--batch_size", "1", CRAMPED_MOST="0")
    assert code == ExitCode.OUT_OF_MEMORY
    assert "beginning again with batch_size 1 x gradient_accumulation 1, gradient_checkpointing" in said
    assert said.count("Nothing is left to make smaller. Lower --resolution or --rank") == 1


def run_config(folder, **changes) -> RunConfig:
    config = {
        "model": {"arch": "zimage", "name_or_path": "/m"},
        "datasets": [{"folder_path": "/d"}],
        "train": {"batch_size": 2},
    }
    return RunConfig.model_validate(document_of(folder, "u", config, 1) | changes)


def test_the_same_command_keeps_to_the_smaller_size_and_another_batch_size_begins_at_its_own(tmp_path):
    path = write_run_config(tmp_path, run_config(tmp_path))
    assert smaller.shrink(path) == (
        "out of device memory: beginning again with batch_size 1 x gradient_accumulation 2 instead of "
        "batch_size 2 x gradient_accumulation 1"
    )
    train = run_config(tmp_path).config.train
    assert shrunk_before(tmp_path, train) == 1
    assert shrunk_before(tmp_path, train.model_copy(update={"batch_size": 4})) == 0
    assert shrunk_before(tmp_path / "new", train) == 0


def test_an_operators_run_is_left_to_the_operator(tmp_path):
    path = write_run_config(tmp_path, run_config(tmp_path, namespace="team-a"))
    assert smaller.shrink(path) is None


@pytest.mark.parametrize("helps", [True, False])
def test_only_training_steps_without_room_are_begun_again(tmp_path, helps):
    path = write_run_config(tmp_path, run_config(tmp_path))
    assert not smaller.shrinking_helps(path), "without a word nothing is known"
    end = ExitWord(code=86, reason="OutOfDeviceMemory", message="full", shrink_helps=helps)
    beat = Progress(start=1, attempt=1, stage="Training", step=1, steps=2, updated_at="now", exit=end)
    (tmp_path / "progress.json").write_text(beat.model_dump_json(by_alias=True))
    assert smaller.shrinking_helps(path) is helps


def test_several_processes_are_begun_again_together(command):
    code, said = command("--nproc_per_node", "2", "--batch_size", "2", CRAMPED_MOST="1")
    assert code == 0, said
    assert said.count("beginning again with batch_size 1 x gradient_accumulation 2 instead of batch_size 2") == 1
