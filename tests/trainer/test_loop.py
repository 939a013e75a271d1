"""What the loop computes: averages, world sizes, steps that are not finite, number formats."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lora_api.config import TrainerConfig
from lora_api.run import Control
from lora_trainer.data.sampler import BatchOrder
from lora_trainer.data.stream import Batches, BatchMaker, Share
from lora_trainer.errors import NotFiniteError
from lora_trainer.loop import Loop
from lora_trainer.losses import loss_of
from lora_trainer.networks import add_adapter
from lora_trainer.noise_levels import NoiseLevels
from lora_trainer.objective import Objective, draw, noisy
from lora_trainer.optimizers import build_optimizer
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import TORCH_DTYPE, Group
from lora_trainer.settings import Settings
from lora_trainer.state import TrainState, pack, unpack
from lora_trainer.stopping import StopRequest
from lora_trainer.timing import PartTimer

CPU = torch.device("cpu")


class Numbers:
    """Stands for `SampleReader`: six samples of one size, made up."""

    masked = False

    def __init__(self, model, channels: int) -> None:
        self._latents = torch.randn((6, channels, 4, 4), generator=torch.Generator().manual_seed(1))
        self._captions = [model.encode_text(text) for text in ("a", "b b", "c c c", "d", "e", "f", "")]

    def latents(self, number: int) -> torch.Tensor:
        return self._latents[number]

    def condition(self, number: int, drop: float) -> dict[str, torch.Tensor]:
        return self._captions[-1 if drop < 0.2 else number]


def config(**train: Any) -> TrainerConfig:
    network = train.pop("network", {"type": "lora", "linear": 2})
    return TrainerConfig.model_validate(
        {
            "model": {"arch": "zimage", "name_or_path": "/m"},
            "datasets": [{"folder_path": "/d"}],
            "network": network,
            "train": {"steps": 4, "lr": 1e-3, "dtype": "fp32"} | train,
        }
    )


class Rig:
    """A loop over made-up samples, without a run directory."""

    def __init__(self, load_tiny, arch="zimage", batch_hook=None, ahead=0, **train: Any) -> None:
        self.config = config(**train)
        self.model = load_tiny(arch, TORCH_DTYPE[self.config.train.dtype])
        numbers = Numbers(self.model, 16 if arch == "zimage" else 64)
        self.model.free_encoders()
        self.adapter = add_adapter(self.model, self.config.network, seed=0)
        self.optimizer = build_optimizer(self.adapter.parameters(), self.config.train)
        share = Share(self.config.train.batch_size, self.config.train.gradient_accumulation)
        order = BatchOrder(["one"] * 6, share.global_batch, 42)
        maker = BatchMaker(numbers, order, self.model, share, Objective.of(self.config.train, self.model))
        make = maker.make if batch_hook is None else lambda i, m: batch_hook(i, maker.make(i, m))
        self.reporter = Reporter(None, 1, 1)
        self.batches = Batches(make, 0, share.accumulation, ahead)
        self.state = TrainState()
        self.loop = Loop(
            config=self.config,
            settings=Settings.of(self.config),
            state=self.state,
            model=self.model,
            optimizer=self.optimizer,
            batches=self.batches,
            group=Group(0, 1, CPU),
            stop=StopRequest(),
            reporter=self.reporter,
        )

    def run(self) -> dict[str, torch.Tensor]:
        try:
            self.loop.run()
        finally:
            self.batches.close()
        return self.adapter.state_dict()


def poison(iterations):
    """Makes the batches of some iterations not finite."""

    def hook(iteration, batch):
        if iteration in iterations:
            batch.x_t[0, 0, 0, 0] = float("nan")
        return batch

    return hook


# ---------------------------------------------------------------------- averages
def test_accumulating_four_batches_of_one_equals_one_batch_of_four(load_tiny, arch):
    four = Rig(load_tiny, arch, batch_size=4).run()
    accumulated = Rig(load_tiny, arch, gradient_accumulation=4).run()
    start = Rig(load_tiny, arch, steps=1, lr=1e-12).run()
    moved = max((four[key] - start[key]).abs().max() for key in four)
    assert moved > 1e-3
    for key in four:
        torch.testing.assert_close(accumulated[key], four[key], atol=2e-5, rtol=1e-4)


def test_the_reported_loss_is_the_mean_over_the_step_s_samples(load_tiny):
    losses = {}
    for name, options in {"four": {"batch_size": 4}, "accumulated": {"gradient_accumulation": 4}}.items():
        rig = Rig(load_tiny, steps=1, **options)
        rig.run()
        losses[name] = rig.reporter.now.loss
    assert losses["four"] == pytest.approx(losses["accumulated"], rel=1e-5)


def test_the_norm_limit_holds_over_all_parameters_together(load_tiny):
    seen = []
    rig = Rig(load_tiny, steps=1, max_grad_norm=1e-3)
    step = rig.optimizer.step

    def record():
        seen.append(torch.nn.utils.get_total_norm([p.grad for p in rig.adapter.parameters()]).item())
        return step()

    rig.optimizer.step = record
    rig.run()
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)
    assert rig.reporter.now.grad_norm > 1e-3


def test_the_loss_falls_when_a_few_samples_are_learned_by_heart(load_tiny):
    rig = Rig(load_tiny, steps=40, lr=1e-2, batch_size=4, network={"type": "lora", "linear": 8})
    losses = []
    original = rig.reporter.stepped
    rig.reporter.stepped = lambda **facts: (losses.append(facts["loss"]), original(**facts))
    rig.run()
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


# ---------------------------------------------------------------------- counter-based noise
def test_draws_depend_on_seed_iteration_and_slot_alone():
    first = draw(1, 5, 2, (4, 4), NoiseLevels())
    torch.manual_seed(99)
    again = draw(1, 5, 2, (4, 4), NoiseLevels())
    assert torch.equal(first.noise, again.noise)
    assert (first.u, first.drop) == (again.u, again.drop)
    others = [draw(*numbers, (4, 4), NoiseLevels()) for numbers in ((2, 5, 2), (1, 6, 2), (1, 5, 3))]
    assert all(not torch.equal(first.noise, other.noise) for other in others)


def test_the_noisy_latents_lie_on_the_straight_path():
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    x_t, target = noisy(x0, noise, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(x_t[0], x0[0])
    torch.testing.assert_close(x_t[1], noise[1])
    assert loss_of(target, target).trained == 0


# ---------------------------------------------------------------------- not finite
def test_a_step_that_is_not_finite_is_skipped_and_counted_and_the_next_batch_is_taken(load_tiny):
    rig = Rig(load_tiny, batch_hook=poison({1}))
    state = rig.run()
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    assert (rig.state.step, rig.state.iteration) == (4, 5)
    assert rig.reporter.now.nonfinite_steps == 1
    assert rig.state.nonfinite_in_a_row == 0


def test_a_skipped_step_leaves_no_trace_in_the_optimizer(load_tiny):
    skipped = Rig(load_tiny, steps=1, batch_hook=poison({0}))
    skipped.run()
    (first, *_) = skipped.optimizer.state_dict()["state"].values()
    assert first["step"].item() == 1


def test_too_many_in_a_row_end_the_run_without_ever_updating(load_tiny):
    rig = Rig(load_tiny, batch_hook=poison(range(100)), max_nonfinite_steps=3)
    before = rig.adapter.state_dict()
    with pytest.raises(NotFiniteError, match="3 times in a row after step 0"):
        rig.run()
    assert all(torch.equal(before[key], value) for key, value in rig.adapter.state_dict().items())


# ---------------------------------------------------------------------- number formats
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_fp32_adapters(load_tiny, dtype):
    rig = Rig(load_tiny, steps=3, dtype=dtype)
    state = rig.run()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    full = Rig(load_tiny, steps=3)
    full.run()
    assert rig.reporter.now.loss == pytest.approx(full.reporter.now.loss, rel=0.05)


def test_an_fp16_overflow_halves_the_loss_scale_without_counting_as_a_failure(load_tiny):
    rig = Rig(load_tiny, steps=2, dtype="fp16", batch_hook=poison({0}))
    rig.run()
    assert rig.state.loss_scale == 32768.0
    assert rig.reporter.now.nonfinite_steps == 0
    assert rig.state.iteration == 3


def test_gradient_checkpointing_changes_no_bit(load_tiny, arch):
    plain = Rig(load_tiny, arch, steps=2).run()
    rig = Rig(load_tiny, arch, steps=2)
    rig.model.enable_gradient_checkpointing()
    state = rig.run()
    assert all(torch.equal(plain[key], state[key]) for key in plain)


# ---------------------------------------------------------------------- state, settings, timing
def test_packing_and_unpacking_loses_no_bit(load_tiny):
    rig = Rig(load_tiny, steps=2)
    rig.run()
    rig.state.loss_scale, rig.state.nonfinite_in_a_row = 128.0, 2
    files = pack(rig.adapter, rig.optimizer, rig.state, {"seed": 1})
    fresh = Rig(load_tiny)
    fresh.batches.close()
    state = unpack(files, fresh.adapter, fresh.optimizer)
    assert state == rig.state
    assert pack(fresh.adapter, fresh.optimizer, state, {"seed": 1}) == files
    assert json.loads(files["state.json"])["seed"] == 1


def test_the_loop_stops_at_the_end_of_the_step_that_a_signal_arrives_in(load_tiny):
    rig = Rig(load_tiny)

    def signal_arrives(step, settings):
        if step == 2:
            rig.loop.stop.signal_name = "SIGTERM"

    rig.loop.after_step = signal_arrives
    assert rig.loop.run() is False
    rig.batches.close()
    assert rig.state.step == 2


def test_a_sample_block_that_does_not_fit_leaves_the_samples_as_they_were(caplog):
    settings = Settings.of(config())
    control = Control(generation=1, steps=5, lr=1.0, save_every=1, max_step_saves=1, sample={"widht": 64})
    changed = settings.taking(control)
    assert (changed.steps, changed.sample) == (5, settings.sample)
    assert "did you mean width?" in caplog.text


def test_the_parts_of_a_step_are_timed_and_averaged(load_tiny):
    rig = Rig(load_tiny, steps=4)
    rig.loop.timer = PartTimer(2)
    lines = []
    rig.reporter.line = lambda **values: lines.append(values)
    rig.run()
    assert [line["step"] for line in lines] == [2, 4]
    assert {"data", "forward", "backward", "optimizer", "save"} <= set(lines[0]["milliseconds"])


def test_batches_made_ahead_in_a_thread_train_the_same_to_the_bit(load_tiny):
    at_once = Rig(load_tiny, gradient_accumulation=2).run()
    ahead = Rig(load_tiny, gradient_accumulation=2, ahead=3).run()
    assert all(torch.equal(at_once[key], ahead[key]) for key in at_once)


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_while_a_batch_is_made_is_raised_in_the_loop(load_tiny, ahead):
    def broken(iteration, batch):
        if iteration == 2:
            raise ValueError("no such picture")
        return batch

    rig = Rig(load_tiny, batch_hook=broken, ahead=ahead)
    with pytest.raises(ValueError, match="no such picture"):
        rig.run()
    assert rig.state.step == 2
