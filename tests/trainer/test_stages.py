"""Stages on a tiny model: what each trains, and that no interruption changes a bit, wherever it falls."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_trainer import checkpoint
from lora_trainer.course import Course
from lora_trainer.data.stream import BatchMaker, MicroBatch
from lora_trainer.runtime import Group
from lora_trainer.stages import Stage
from lora_trainer.state import TrainState
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.test_resume import same_training
from tests.trainer.test_stopping import TWO_RANKS, Process

STAGES = [
    {"steps": 3, "batch_size": 2, "gradient_accumulation": 2, "lr": 3e-3, "lr_scheduler": "cosine"},
    {"steps": 2, "resolution": [32], "caption_dropout": 1.0},
    {"steps": 3, "warmup_steps": 2},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    def make(stages: list[dict[str, Any]] = STAGES, **train: Any) -> Job:
        found = Job(tmp_path / "whole", tiny_model_folder("zimage"), data, cache)
        found.config["network"] = {"type": "lora", "linear": 2, "dropout": 0.1}
        found.config["train"] = {"dtype": "fp32", "lr": 1e-3, "stages": stages} | train
        return found

    return make


@pytest.fixture
def seen(monkeypatch):
    """The batches that are made, with their iterations."""
    found: list[tuple[int, MicroBatch]] = []
    original = BatchMaker.make

    def make(maker: BatchMaker, iteration: int, micro: int) -> MicroBatch:
        batch = original(maker, iteration, micro)
        found.append((iteration, batch))
        return batch

    monkeypatch.setattr(BatchMaker, "make", make)
    return found


def poisoned(monkeypatch, iterations: set[int]) -> None:
    """Makes the batches of some iterations not finite."""
    original = BatchMaker.make

    def make(maker: BatchMaker, iteration: int, micro: int) -> MicroBatch:
        batch = original(maker, iteration, micro)
        if iteration in iterations:
            batch.x_t[0, 0, 0, 0] = float("nan")
        return batch

    monkeypatch.setattr(BatchMaker, "make", make)


def test_each_stage_trains_what_it_says(job, seen):
    whole = job()
    assert whole.run() == ExitCode.DONE
    shapes = [(iteration, batch.x_t.shape[0], batch.x_t.shape[-1] * batch.x_t.shape[-2]) for iteration, batch in seen]
    assert [shape[:2] for shape in shapes] == [
        (0, 2), (0, 2), (1, 2), (1, 2), (2, 2), (2, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1),
    ]  # fmt: skip
    assert all((area <= 16) == (iteration in (3, 4)) for iteration, _, area in shapes)  # 32 pixels are 4 latents
    rates = [line["lr"] for line in whole.metrics() if "loss" in line]
    assert rates == pytest.approx([3e-3, 2.25e-3, 0.75e-3, 1e-3, 1e-3, 0.5e-3, 1e-3, 1e-3])
    assert [line["samples"] for line in whole.metrics() if "loss" in line] == [4, 8, 12, 13, 14, 15, 16, 17]
    changes = [(line["step"], line["stage"], line["samples_per_step"]) for line in whole.metrics() if "stage" in line]
    assert changes == [(3, 2, 1), (5, 3, 1)]
    state = json.loads(whole.newest()[checkpoint.STATE])
    assert (state["stage"], state["stage_iteration"]) == (2, 5)


def test_interruptions_at_a_boundary_inside_and_before_one_change_no_bit(job):
    whole = job().change(save={"save_every": 2})
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(stop_after=3) == ExitCode.PREEMPTED  # at the first boundary
    assert broken.run(crash_after=5) == 1  # at the second, without saving: it resumes inside the second stage
    assert broken.run(stop_after=7) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert broken.steps() == [2, 3, 4, 6, 7, 8]
    assert same_training(whole, broken)


def test_skipped_iterations_beside_a_boundary_change_no_bit(job, monkeypatch):
    poisoned(monkeypatch, {1, 4, 5})  # the second stage begins with iteration 4, and with two that are skipped
    whole = job()
    assert whole.run() == ExitCode.DONE
    state = json.loads(whole.newest()[checkpoint.STATE])
    assert (state["step"], state["iteration"], state["stage_iteration"]) == (8, 11, 8)
    for step in (3, 4, 6):
        broken = whole.copy(f"broken-{step}")
        assert broken.run(stop_after=step) == ExitCode.PREEMPTED
        assert broken.run() == ExitCode.DONE
        assert same_training(whole, broken)


def test_raising_the_steps_of_a_finished_run_lengthens_the_last_stage_to_the_bit(job):
    longer = job([*STAGES[:2], {}], steps=10, lr_scheduler="constant")
    assert longer.run() == ExitCode.DONE
    finished = longer.copy("finished")
    finished.config["train"] |= {"steps": 7, "stages": [*STAGES[:2], {"steps": 2}]}
    assert finished.run() == ExitCode.DONE
    finished.config["train"] |= {"steps": 10, "stages": [*STAGES[:2], {"steps": 5}]}
    finished.store.delete([layout.FINAL_MANIFEST])
    assert finished.run() == ExitCode.DONE
    assert finished.steps() == [3, 6, 7, 9, 10]
    assert same_training(longer, finished)


def test_a_stage_of_a_resolution_trains_what_a_run_of_that_resolution_does(job, seen):
    assert job([{"steps": 3, "resolution": [32]}]).run() == ExitCode.DONE
    staged = [batch.x_t for _, batch in seen]
    seen.clear()
    plain = job([], steps=3).copy("plain")
    plain.config["datasets"][0]["resolution"] = [32]
    assert plain.run() == ExitCode.DONE
    assert all(torch.equal(one, batch.x_t) for one, (_, batch) in zip(staged, seen, strict=True))


def test_a_checkpoint_from_before_there_were_stages_still_loads(job):
    whole = job([], steps=6)
    assert whole.run() == ExitCode.DONE
    old = whole.copy("old")
    assert old.run(stop_after=3) == ExitCode.PREEMPTED
    folder = layout.checkpoint_folder(3, 1)
    state = json.loads(old.store.get(folder + checkpoint.STATE))
    raw = json.dumps({key: value for key, value in state.items() if not key.startswith("stage")}).encode()
    old.store.put(folder + checkpoint.STATE, raw)
    manifest = json.loads(old.store.get(folder + layout.MANIFEST))
    entry = checkpoint.entry(checkpoint.STATE, raw).model_dump(by_alias=True)
    manifest["files"] = [entry if file["name"] == checkpoint.STATE else file for file in manifest["files"]]
    old.store.put(folder + layout.MANIFEST, json.dumps(manifest).encode())
    assert old.run() == ExitCode.DONE
    assert old.progress().resumed_from_step == 3
    assert same_training(whole, old)


def test_two_ranks_train_the_samples_of_one_in_every_stage(load_tiny):
    from lora_api.training import TrainConfig

    prepared = made_up(load_tiny("zimage"))
    view = next(iter(prepared.views))

    def trained(world_size: int) -> list[list[float]]:
        rows = []
        for stage in (Stage(0, 2, 0, 3, 4, 2, None, None, view), Stage(1, 2, 3, None, 2, 1, None, None, view)):
            share = stage.batch_size // world_size
            own = Stage(stage.number, 2, stage.begin, stage.end, share, stage.accumulation, None, None, view)
            ranks = [Group(rank, world_size, torch.device("cpu")) for rank in range(world_size)]
            state = TrainState(step=3, iteration=5, stage=stage.number, stage_iteration=4)
            feeds = [Course(prepared, TrainConfig(dtype="fp32"), rank).batches(own, state) for rank in ranks]
            rows += [torch.cat([feed.next().x_t for feed in feeds]).flatten().tolist() for _ in range(6)]
        return rows

    assert trained(2) == trained(1)


@pytest.mark.timeout(900)  # seven processes import torch
def test_two_processes_go_on_across_stages_to_the_bit_and_train_what_one_does(job):
    stages = [{"steps": 3, "batch_size": 2, "gradient_accumulation": 2}, {"batch_size": 1, "lr": 3e-4}]
    whole = job(stages, steps=7)
    whole.config["network"] = {"type": "lora", "linear": 2}
    assert Process(whole, *TWO_RANKS).end(None, 240) == ExitCode.DONE
    broken = whole.copy("broken")
    broken.config["train"] |= {"steps": 5}
    assert Process(broken, *TWO_RANKS).end(None, 240) == ExitCode.DONE
    broken.config["train"] |= {"steps": 7}
    broken.store.delete([layout.FINAL_MANIFEST])
    assert Process(broken, *TWO_RANKS).end(None, 240) == ExitCode.DONE
    assert broken.progress().resumed_from_step == 5
    assert same_training(whole, broken)
    alone = whole.copy("alone")
    alone.config["train"] |= {"stages": [stages[0] | {"batch_size": 4}, stages[1] | {"batch_size": 2}]}
    assert alone.run() == ExitCode.DONE
    one, two = (load(each.newest()[checkpoint.ADAPTER]) for each in (alone, whole))
    for key, tensor in one.items():  # gradients are summed in another order
        torch.testing.assert_close(two[key], tensor, atol=1e-5, rtol=1e-3)


def made_up(model: Any) -> Any:
    """`Prepared` with eight samples of two buckets, none of them on disk."""
    from types import SimpleNamespace

    from lora_api.datasets import DatasetConfig
    from lora_trainer.data.buckets import Size
    from lora_trainer.data.cache import latents_key, text_key
    from lora_trainer.data.samples import Sample

    samples = [
        Sample(picture=None, sha256=str(n), bucket=Size(64, 64 if n < 5 else 96), caption=f"{n}", dropped_caption="",
               dropout=0.0, cached=True) for n in range(8)
    ]  # fmt: skip
    tensors = {
        latents_key(sample, model.latents_identity): {
            "latents": torch.randn(16, 8, sample.bucket.height // 8, generator=torch.Generator().manual_seed(n))
        }
        for n, sample in enumerate(samples)
    } | {text_key(s.caption, model.text_identity): model.encode_text(s.caption) for s in samples}
    view = (DatasetConfig(folder_path="/d"),)
    cache = SimpleNamespace(load=tensors.__getitem__)
    return SimpleNamespace(samples=samples, views={view: range(8)}, model=model, cache=cache)
