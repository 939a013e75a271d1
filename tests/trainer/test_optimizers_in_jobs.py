"""Whole jobs with every optimizer: they learn, they differ, and an interruption changes no bit."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import torch
from safetensors.torch import load

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.optimization import Optimizer
from lora_trainer import checkpoint
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.test_loop import Rig, poison

NAMES = get_args(Optimizer)
EVERY = pytest.mark.parametrize("name", NAMES)
RATES = {"prodigy": 1.0, "lion": 6e-3, "schedule_free_adamw": 2e-2}
OWN = {"prodigy": {"optimizer_params": {"d0": 1e-3}}}


def settings(name):
    return {"optimizer": name, "lr": RATES.get(name, 1e-2), **OWN.get(name, {})}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"), [(64, 64), (96, 64)])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    def make(name, **train) -> Job:
        folder = tiny_model_folder("zimage")
        made = Job(tmp_path / "whole", folder, data, cache, train={"steps": 5, **settings(name), **train})
        rule = {"match": "*.to_q", "lr": 0.3 * made.config["train"]["lr"]}
        kind = {"type": "full"} if name == "adamw8bit" else {"linear": 2}  # matrices large enough for 8-bit moments
        made.config["network"] = {**kind, "modules": [rule]}
        return made

    return make


def same_training(one: Job, other: Job) -> bool:
    """Equal checkpoints, to the bit, and equal final weights."""
    first, second = (dict(each.newest()) for each in (one, other))
    states = [json.loads(files.pop(checkpoint.STATE)) for files in (first, second)]
    finals = [load(each.store.get(layout.FINAL + _final_name(each))) for each in (one, other)]
    same_final = all(torch.equal(tensor, finals[1][key]) for key, tensor in finals[0].items())
    return first == second and states[0] == states[1] and same_final


def _final_name(job: Job) -> str:
    return json.loads(job.store.get(layout.FINAL_MANIFEST))["adapter"]


@EVERY
def test_an_interruption_changes_no_bit(name, job):
    whole = job(name, warmup_steps=3)
    assert whole.run() == ExitCode.DONE, whole.word()
    broken = whole.copy("broken")
    assert broken.run(stop_after=2) == ExitCode.PREEMPTED
    assert broken.run(crash_after=4) == 1
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)


@EVERY
def test_it_lowers_the_loss_in_its_own_way_and_a_skipped_step_leaves_no_trace(name, load_tiny):
    options = {"steps": 24, "batch_size": 4, "network": {"type": "lora", "linear": 8}}
    rig = Rig(load_tiny, **options, **settings(name), batch_hook=poison({5}))
    losses = []
    original = rig.reporter.stepped
    rig.reporter.stepped = lambda **facts: (losses.append(facts["loss"]), original(**facts))
    trained = rig.run()
    assert (rig.state.step, rig.state.iteration) == (24, 25)
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    if name not in ("adamw", "adamw8bit"):  # so small a matrix has moments in fp32 anyway
        plain = Rig(load_tiny, **options, lr=settings(name)["lr"], batch_hook=poison({5})).run()
        assert any(not torch.allclose(plain[key], trained[key], atol=1e-3) for key in trained)


def test_metrics_and_heartbeat_tell_the_rate_that_prodigy_found(job):
    found = job("prodigy", steps=12, optimizer_params={"d0": 1e-5})
    assert found.run() == ExitCode.DONE
    rates = [line["lr"] for line in found.metrics() if "lr" in line]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[-1] > 2 * rates[0]
    assert found.progress().learning_rate == pytest.approx(rates[-1], rel=1e-5)
