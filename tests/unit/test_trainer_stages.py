"""Stages: which one a step is in, what it costs, and at which rate it is trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lora_api.config import TrainerConfig
from lora_api.memory.estimate import batch_of
from lora_api.run import config_hash
from lora_api.shrink import can_shrink
from lora_trainer.reporting import Reporter
from lora_trainer.schedule import learning_rate
from lora_trainer.settings import Settings
from lora_trainer.stages import rate_at, samples_by, stage_at, stages_of, steps_left, views_of
from lora_trainer.views import describe

MISSION = [{"steps": 3000, "batch_size": 8, "gradient_accumulation": 4}, {"steps": 6000, "batch_size": 1}]


def config(*stages: dict[str, Any], datasets: tuple[dict[str, Any], ...] = ({},), **train: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": {"arch": "zimage", "name_or_path": "/m"},
            "datasets": [{"folder_path": "/d"} | each for each in datasets],
            "train": {"stages": list(stages)} | train,
        }
    )


def rates(found: TrainerConfig, **settings: Any) -> list[float]:
    now = replace(Settings.of(found), **settings)
    stages = stages_of(found)
    return [rate_at(step, stage_at(stages, step), found.train, now) for step in range(now.steps)]


def cosine(steps: int) -> list[float]:
    return [0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


# ------------------------------------------------------------------ where a stage begins
def test_a_run_without_stages_is_one_that_ends_with_the_run():
    (stage,) = stages_of(config(batch_size=3, gradient_accumulation=2))
    assert (stage.begin, stage.end, stage.batch_size, stage.accumulation, stage.name) == (0, None, 3, 2, "")


def test_the_stages_of_the_mission_follow_each_other():
    first, second = stages_of(config(*MISSION))
    assert (first.begin, first.end, first.batch_size, first.accumulation) == (0, 3000, 8, 4)
    assert (second.begin, second.end, second.batch_size, second.accumulation) == (3000, None, 1, 1)
    assert [stage_at((first, second), step).name for step in (0, 2999, 3000, 8999, 20000)] == [
        "stage 1/2", "stage 1/2", "stage 2/2", "stage 2/2", "stage 2/2",
    ]  # fmt: skip


def test_steps_left_out_are_the_sum_of_the_stages_or_a_thousand():
    assert config(*MISSION).train.steps == 9000
    assert config({"steps": 500}, {}, steps=700).train.steps == 700
    assert config().train.steps == 1000


def test_what_a_stage_leaves_out_is_the_run_s():
    dropout = {"caption_dropout": 0.2, "resolution": [64, 96]}
    first, second, third = stages_of(
        config(
            {"steps": 1}, {"steps": 1, "resolution": [32]}, {"steps": 1, "caption_dropout": 0.0}, datasets=(dropout, {})
        )
    )
    assert [each.resolution for each in first.datasets] == [(64, 96), (512,)]
    assert [(each.resolution, each.caption_dropout) for each in second.datasets] == [((32,), 0.2), ((32,), 0.0)]
    assert [(each.resolution, each.caption_dropout) for each in third.datasets] == [((64, 96), 0.0), ((512,), 0.0)]


def test_stages_that_train_the_datasets_alike_share_their_samples():
    stages = stages_of(config({"steps": 1, "resolution": [512]}, {"steps": 1}, {"steps": 1, "resolution": [64]}))
    assert stages[0].datasets == stages[1].datasets
    assert len(views_of(stages)) == 2


# ------------------------------------------------------------------ rates
def test_a_rate_of_its_own_is_passed_by_when_the_run_s_rate_is_changed():
    found = config({"steps": 2, "lr": 1e-2}, {"steps": 2}, lr=1e-3)
    assert rates(found) == [1e-2, 1e-2, 1e-3, 1e-3]
    assert rates(found, lr=5e-3) == [1e-2, 1e-2, 5e-3, 5e-3]


def test_the_run_s_schedule_goes_on_through_stages_without_one():
    found = config({"steps": 4}, {"steps": 4, "batch_size": 2}, lr=1.0, lr_scheduler="cosine", warmup_steps=2)
    assert rates(found) == [learning_rate(n, base=1.0, steps=8, train=found.train) for n in range(8)]


def test_a_schedule_of_its_own_runs_over_the_stage_s_own_steps():
    found = config({"steps": 4, "lr_scheduler": "cosine"}, {"steps": 6, "warmup_steps": 3, "lr": 2.0}, lr=1.0)
    assert rates(found) == pytest.approx([*cosine(4), 2 / 3, 4 / 3, 2.0, 2.0, 2.0, 2.0])


def test_a_stage_keeps_the_shape_of_the_run_s_schedule_and_replaces_its_warm_up():
    shape = {"lr_scheduler": "cosine", "lr_scheduler_params": {"min_lr_ratio": 0.5}, "warmup_ratio": 0.5, "lr": 1.0}
    found = config({"steps": 4}, {"steps": 4, "lr_scheduler": "linear"}, {"steps": 2, "warmup_steps": 1}, **shape)
    assert rates(found)[4:] == pytest.approx([0.5, 1.0, 1.0, 0.75, 1.0, 1.0])
    own = {"steps": 4, "lr_scheduler": "polynomial", "lr_scheduler_params": {"power": 2}, "warmup_steps": 0}
    assert rates(config(own, **shape)) == pytest.approx([1.0, 9 / 16, 4 / 16, 1 / 16])


def test_the_schedule_of_the_last_stage_ends_with_the_run_however_long_it_has_become():
    found = config({"steps": 4}, {"steps": 4, "lr_scheduler": "cosine"}, lr=1.0)
    longer = rates(found, steps=12)
    assert longer[4:] == pytest.approx(cosine(8))


# ------------------------------------------------------------------ what defines the run
def test_the_length_of_the_last_stage_does_not_part_a_run_from_its_checkpoints_but_all_else_does():
    before = config_hash(config({"steps": 3}, {"steps": 5, "lr": 1.0}))
    assert config_hash(config({"steps": 3}, {"steps": 9, "lr": 1.0})) == before
    assert config_hash(config({"steps": 3}, {"lr": 1.0}, steps=20)) == before
    assert config_hash(config({"steps": 4}, {"steps": 5, "lr": 1.0})) != before
    assert config_hash(config({"steps": 3}, {"steps": 5, "lr": 2.0})) != before


def test_a_run_without_stages_keeps_the_hash_it_had():
    assert config_hash(config()) == config_hash(config(steps=5)) == "a9ac78a848dcbf89"


# ------------------------------------------------------------------ what people are told
def test_samples_are_counted_stage_by_stage():
    stages = stages_of(config(*MISSION))
    assert samples_by(stages, 3000, world_size=1) == 3000 * 32
    assert samples_by(stages, 4000, world_size=2) == 2 * (3000 * 32 + 1000)


def test_the_time_left_counts_steps_by_what_they_cost():
    stages = stages_of(config(*MISSION))
    assert steps_left(stages, 0, 9000) == 3000 + 6000 / 32
    assert steps_left(stages, 3000, 9000) == 6000
    assert steps_left(stages, 2000, 2500) == 500
    larger = stages_of(config({"steps": 10}, {"steps": 10, "resolution": [1024]}))
    assert steps_left(larger, 0, 20) == 10 + 10 * 4


def test_the_eta_is_right_on_both_sides_of_a_stage_s_end():
    stages = stages_of(config(*MISSION))
    reporter = Reporter(None, 1, 1)
    reporter.now.steps = 9000
    reporter.take_stages(stages, stages[0], world_size=1)
    for step in range(1, 3001):
        reporter.stepped(step=step, loss=1.0, lr=1.0, grad_norm=1.0, seconds=3.2)
    reporter.now.step = 2999
    assert reporter.now.eta_seconds == pytest.approx(3.2 + 6000 * 0.1)
    reporter.now.step = 3000
    reporter.enter_stage(stages[1])
    assert reporter.now.eta_seconds == pytest.approx(6000 * 0.1)  # not measured yet
    reporter.stepped(step=3001, loss=1.0, lr=1.0, grad_norm=1.0, seconds=0.25)
    assert reporter.now.eta_seconds == pytest.approx(5999 * 0.25)
    assert reporter.now.samples == 3000 * 32 + 1
    assert reporter.now.steps_per_second == 4.0
    assert describe(replace(reporter.now, stage="Training")).startswith("step 3001/9000  stage 2/2  loss 1.0000")
    assert reporter.progress().detail == ""
    reporter.now.stage = "Training"
    assert reporter.progress().detail == "stage 2/2"


def test_out_of_memory_divides_the_batches_of_every_stage_and_not_its_samples():
    found = config(*MISSION)
    stages = stages_of(found, shrunk=2)
    assert [(stage.batch_size, stage.pieces, stage.passes) for stage in stages] == [(8, 4, 16), (1, 1, 1)]
    assert [(stage.batch_size, stage.accumulation) for stage in stages] == [(8, 4), (1, 1)]
    assert can_shrink(found.train, 3)
    assert not can_shrink(found.train, 4)  # 8, 4, 2, 1 samples, then activations are recomputed


def test_the_memory_estimate_is_that_of_the_largest_stage():
    batch = batch_of(config({"steps": 1, "batch_size": 16, "resolution": [256]}, {"steps": 1, "batch_size": 2}))
    assert (batch.size, batch.pixels) == (16, 256)  # 16 x 256 x 256 pixels are more than 2 x 512 x 512
    batch = batch_of(config({"steps": 1, "batch_size": 16, "resolution": [128]}, {"steps": 1, "batch_size": 2}))
    assert (batch.size, batch.pixels) == (2, 512)
