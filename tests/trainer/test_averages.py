"""Averages of the weights: their formula, and that everything that leaves a run is made from them."""

from __future__ import annotations

import json
import shutil
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.exit_codes import ExitCode
from lora_api.memory.estimate import optimizer_bytes
from lora_api.memory.trained import Trained
from lora_api.optimization import EmaConfig
from lora_api.training import TrainConfig
from lora_trainer import checkpoint, finalize
from lora_trainer.averages import MovingAverage, build_average, decay
from lora_trainer.optimizers import build_optimizer
from lora_trainer.spread import Spread
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.ranks import run_on_two_ranks

EMA = {"use_ema": True, "ema_decay": 0.9}
LR = 3e-2


def walk(parameters, step):
    """Moves parameters somewhere, as an update would."""
    for number, parameter in enumerate(parameters):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number))
        parameter.data.add_(0.1 * noise)


# ---------------------------------------------------------------------- moving average
@pytest.mark.parametrize("warmup", [False, True])
def test_the_moving_average_is_the_sum_that_its_formula_says(warmup):
    config = EmaConfig(use_ema=True, ema_decay=0.8, ema_warmup=warmup)
    parameters = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    average = MovingAverage(parameters, config)
    history, decays = [[p.detach().double().clone() for p in parameters]], []
    for step in range(1, 21):
        walk(parameters, step)
        average.update(step)
        history.append([p.detach().double().clone() for p in parameters])
        decays.append(min(0.8, (1 + step) / (10 + step)) if warmup else 0.8)
    with average.in_place():
        for number, parameter in enumerate(parameters):
            expected, left = torch.zeros_like(history[0][number]), 1.0  # newest first: each weighs what is left to it
            for weights, share in zip(reversed(history[1:]), reversed(decays), strict=True):
                expected += left * (1 - share) * weights[number]
                left *= share
            expected += left * history[0][number]
            torch.testing.assert_close(parameter.detach().double(), expected, atol=1e-6, rtol=1e-5)
            assert (expected - history[-1][number]).abs().max() > 1e-2


def test_the_decay_is_small_at_first_and_never_above_what_was_asked_for():
    warm = EmaConfig(use_ema=True, ema_decay=0.99)
    assert [decay(step, warm) for step in (1, 8, 80)] == pytest.approx([2 / 11, 0.5, 0.9])
    assert decay(10_000, warm) == 0.99
    assert decay(1, EmaConfig(use_ema=True, ema_decay=0.99, ema_warmup=False)) == 0.99


def test_what_is_trained_comes_back_to_the_bit_also_after_an_error():
    parameters = [torch.nn.Parameter(torch.randn(3, 4))]
    average = MovingAverage(parameters, EmaConfig(use_ema=True))
    walk(parameters, 1)
    before = parameters[0].detach().clone()

    def fail():
        with average.in_place():
            assert not torch.equal(parameters[0], before)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(parameters[0], before)
    walk(parameters, 2)
    average.restart()
    with average.in_place():
        assert not torch.equal(parameters[0], before)


def test_the_memory_estimate_counts_it_and_the_optimizer_s_state():
    def counted(**train):
        model = {"arch": "zimage", "name_or_path": "/m"}
        block = {"model": model, "datasets": [{"folder_path": "/d"}], "train": train}
        return optimizer_bytes(TrainerConfig.model_validate(block), Trained(1000, 2, frozenset()))

    assert counted(ema_config={"use_ema": True}) - counted() == 4000
    assert counted(optimizer="prodigy", lr=1.0) - counted(optimizer="lion") == 12_000


# ---------------------------------------------------------------------- schedule-free
def test_the_average_of_schedule_free_is_that_of_its_paper_and_looking_at_it_changes_nothing():
    config = TrainConfig(optimizer="schedule_free_adamw", lr=0.01, weight_decay=0.0, adam_beta1=0.8)
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    runs = []
    for looks in (False, True):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = build_optimizer([parameter], config)
        average = build_average([parameter], optimizer, config)
        z = x = start.double()
        v, total = torch.zeros_like(z), 0.0
        for t in range(1, 13):
            gradient = parameter.detach() + torch.randn(6, 5, generator=torch.Generator().manual_seed(t))
            parameter.grad = gradient.clone()
            lr = optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, t / 5)  # a warm-up, by which the average weighs
            optimizer.step()
            v = 0.999 * v + 0.001 * gradient.double() ** 2
            z = z - lr * gradient.double() / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            total += lr**2
            x = x + lr**2 / total * (z - x)
            if looks:
                with average.in_place():
                    torch.testing.assert_close(parameter.detach().double(), x, atol=2e-6, rtol=1e-4)
                torch.testing.assert_close(parameter.detach().double(), 0.2 * z + 0.8 * x, atol=2e-6, rtol=1e-4)
        runs.append(parameter.detach())
    assert torch.equal(*runs)
    assert (x - runs[0]).abs().max() > 1e-3


# ---------------------------------------------------------------------- whole jobs
@pytest.fixture
def job(tmp_path, tiny_model_folder):
    def make(arch="zimage", network=None, **train) -> Job:
        data = make_pictures(tmp_path / "data", [(64, 64), (96, 64)])
        made = Job(tmp_path / "whole", tiny_model_folder(arch), data, tmp_path / "cache", arch, save={"save_every": 2})
        made.config["network"] = network or {"type": "lora", "linear": 2}
        return made.change(train={"steps": 5, "lr": LR, "ema_config": EMA} | train)

    return make


def watched(job: Job, **options) -> tuple[int, list[dict[str, torch.Tensor]]]:
    """Runs a job; the weights before the first update and after each."""
    states = []

    def watch(session, step):
        states.append({key: t.clone() for key, t in session.prepared.adapter.checkpoint_tensors().items()})

    return job.run(hook=watch, **options), states


def files_of(job: Job, step: int) -> dict[str, bytes]:
    folder = layout.checkpoint_folder(step, 1)
    return {item.key.removeprefix(folder): job.store.get(item.key) or b"" for item in job.store.list(folder)}


def test_the_final_adapter_and_those_of_checkpoints_are_the_average_and_training_does_not_notice_it(job):
    averaged, plain = job(), job(ema_config={"use_ema": False})
    plain.folder = averaged.folder.with_name("plain")
    code, states = watched(averaged)
    assert code == ExitCode.DONE, averaged.word()
    assert plain.run() == ExitCode.DONE
    assert checkpoint.TRAINING not in plain.newest()
    plain_end = load(plain.newest()[checkpoint.ADAPTER])
    assert all(torch.equal(tensor, plain_end[key]) for key, tensor in states[-1].items())
    first = load(files_of(averaged, 2)[checkpoint.TRAINING])
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in first.items())
    shadow = {key: tensor.double() for key, tensor in start_of(job, plain).items()}
    for step, state in enumerate(states, 1):
        share = min(0.9, (1 + step) / (10 + step))
        shadow = {key: share * value + (1 - share) * state[key].double() for key, value in shadow.items()}
        if step == 4:
            assert_same(load(files_of(averaged, 4)[checkpoint.ADAPTER]), shadow)
    assert_same(load(averaged.newest()[checkpoint.ADAPTER]), shadow)
    final = load(averaged.store.get(layout.FINAL + "adapter.safetensors"))
    assert_same({key: tensor for key, tensor in final.items() if "alpha" not in key}, shadow)
    assert max((states[-1][key].double() - value).abs().max() for key, value in shadow.items()) > 1e-2


def start_of(job, plain: Job) -> dict[str, torch.Tensor]:
    """The weights before the first update: after one that moved nothing."""
    still = plain.copy("still").change(train={"steps": 1, "lr": 1e-30, "weight_decay": 0.0})
    assert still.run() == ExitCode.DONE
    return load(still.newest()[checkpoint.ADAPTER])


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[key], atol=1e-6, rtol=1e-5)


STRATEGIES = {
    "lokr": ("zimage", {"type": "lokr", "lokr_factor": 4}, {}),
    "mixed": ("zimage", {"linear": 2, "modules": [{"match": "*.to_q", "type": "loha", "lr": 1e-3}]}, {}),
    "full": ("zimage", {"type": "full"}, {"lr": 1e-3}),
    "text encoder": ("sd15", None, {"train_text_encoder": True, "text_encoder_lr": 1e-3}),
    "two experts": ("wan22", None, {}),
    "schedule-free": ("zimage", None, {"optimizer": "schedule_free_adamw", "ema_config": {}, "warmup_steps": 3}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_interruption_changes_no_bit_of_average_and_training(strategy, job):
    arch, network, train = STRATEGIES[strategy]
    whole = job(arch, network, **train)
    assert whole.run() == ExitCode.DONE, whole.word()
    broken = whole.copy("broken")
    assert broken.run(stop_after=3) == ExitCode.PREEMPTED
    assert broken.run(crash_after=4) == 1
    assert broken.run() == ExitCode.DONE
    ends = [dict(each.newest()) for each in (whole, broken)]
    assert checkpoint.TRAINING in ends[0]
    assert ends[0] == ends[1]
    average, training = (load(ends[0][name]) for name in (checkpoint.ADAPTER, checkpoint.TRAINING))
    assert average.keys() == training.keys()
    assert any(not torch.equal(tensor, training[key]) for key, tensor in average.items())
    finals = [
        {
            item.key: load(each.store.get(item.key))
            for item in each.store.list(layout.FINAL)
            if ".safetensors" in item.key
        }
        for each in (whole, broken)
    ]
    for name, tensors in finals[0].items():
        assert all(torch.equal(tensor, finals[1][name][key]) for key, tensor in tensors.items())


def test_two_ranks_keep_the_average_across_an_interruption(job):
    whole = job(steps=4)
    broken = whole.copy("broken")
    assert run_on_two_ranks(whole) == ExitCode.DONE
    shutil.copytree(whole.folder / "run", broken.folder / "run")
    lost = [layout.checkpoint_folder(4, 1) + layout.MANIFEST, layout.FINAL_MANIFEST]
    broken.store.delete(lost)
    assert run_on_two_ranks(broken) == ExitCode.DONE
    assert broken.progress().resumed_from_step == 2
    for name in (checkpoint.ADAPTER, checkpoint.TRAINING, checkpoint.OPTIMIZER):
        assert whole.newest()[name] == broken.newest()[name]


def test_the_portable_file_of_a_checkpoint_holds_the_average_too(job):
    arch, network, _ = STRATEGIES["lokr"]
    whole = job(arch, {**network, "type": "loha", "linear": 2})
    assert whole.run() == ExitCode.DONE, whole.word()
    held = files_of(whole, 5)
    portable = next(name for name in held if name.startswith("portable"))
    final = load(whole.store.get(layout.FINAL + "adapter.safetensors"))
    assert_same(load(held[portable]), {key: tensor.double() for key, tensor in final.items()})


def test_samples_while_training_and_at_the_end_are_drawn_with_the_average(job):
    drawing = job(steps=3)
    drawing.change(
        save={"save_every": 1},
        sample={"prompts": ["a cube"], "width": 32, "height": 32, "sample_steps": 1, "sample_every": 2},
    )
    sessions, drawn = [], []
    original = finalize.draw_samples

    def record(model, *arguments, **options):
        drawn.append({k: t.clone() for k, t in sessions[-1].prepared.adapter.checkpoint_tensors().items()})
        return original(model, *arguments, **options)

    with patch.object(finalize, "draw_samples", record):
        assert drawing.run(hook=lambda session, step: sessions.append(session)) == ExitCode.DONE, drawing.word()
    for state, step in zip(drawn, (2, 3), strict=True):
        held = load(files_of(drawing, step)[checkpoint.ADAPTER])
        assert all(torch.equal(tensor, held[key]) for key, tensor in state.items())


def test_a_checkpoint_of_before_there_were_averages_is_read_and_the_average_begins_with_it(job):
    old = job(ema_config={"use_ema": False})
    assert old.run() == ExitCode.DONE
    files = old.newest()
    from lora_trainer.state import TrainState, unpack

    seen = []

    class Loaded:
        spread = Spread()

        def parameters(self):
            return self.held

        def load_checkpoint_tensors(self, tensors):
            self.held = [torch.nn.Parameter(tensor) for tensor in tensors.values()]

    class Heard:
        def restart(self):
            seen.append("restarted")

    loaded = Loaded()
    parameters = [torch.nn.Parameter(tensor) for tensor in load(files[checkpoint.ADAPTER]).values()]
    optimizer = build_optimizer(parameters, TrainConfig())
    state = unpack(files, loaded, optimizer, Heard())
    assert isinstance(state, TrainState)
    assert state.step == 5
    assert seen == ["restarted"]
    assert json.loads(files[checkpoint.STATE])["version"] == 1
