"""Learning rates: where they turn, and against torch's own schedulers or the paper's formula, step by step."""

from __future__ import annotations

import math

import pytest

from lora_api.training import TrainConfig
from lora_trainer.schedule import learning_rate


def rate(step, kind="cosine", *, base=1.0, steps=100, warmup=10, ratio=0.0, **params):
    train = TrainConfig(lr_scheduler=kind, warmup_steps=warmup, warmup_ratio=ratio, lr_scheduler_params=params)
    return learning_rate(step, base=base, steps=steps, train=train)


def of_torch(scheduler, steps, lr=1.0, **options):
    """The rate of each step as a scheduler of torch sets it."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    made = getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **options)
    rates = []
    for step in range(steps):
        rates.append(made.get_last_lr()[0])
        optimizer.step()
        if step + 1 < steps:
            made.step()
    return rates


# ---------------------------------------------------------------------- warm-up
def test_the_warm_up_rises_in_equal_parts_and_never_wastes_a_step_at_zero():
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "rex"])
def test_a_warm_up_as_a_share_of_the_steps_is_the_same_as_in_steps(kind):
    shares = [rate(step, kind, warmup=0, ratio=0.1) for step in range(100)]
    assert shares == [rate(step, kind, warmup=10) for step in range(100)]
    assert shares[0] == 0.1


def test_a_warm_up_as_a_share_grows_with_the_steps():
    assert rate(19, steps=200, warmup=0, ratio=0.1) == 1.0
    assert rate(9, steps=200, warmup=0, ratio=0.1) == 0.5


def test_without_warm_up_it_begins_at_the_base():
    assert rate(0, warmup=0) == 1.0


def test_a_warm_up_longer_than_the_run_does_not_divide_by_zero():
    assert rate(5, steps=5, warmup=10) == pytest.approx(0.6)


# ---------------------------------------------------------------------- schedules
def test_the_constant_schedule_is_constant_after_the_warm_up():
    assert {rate(step, kind="constant") for step in (10, 50, 99)} == {1.0}


def test_the_cosine_falls_from_the_base_to_zero():
    assert rate(10) == pytest.approx(1.0)
    assert rate(55) == pytest.approx(0.5)
    assert rate(100) == pytest.approx(0.0)
    assert rate(99) > 0


@pytest.mark.parametrize(
    ("kind", "params", "scheduler", "options"),
    [
        ("linear", {}, "LinearLR", {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 60}),
        ("linear", {"min_lr_ratio": 0.2}, "LinearLR", {"start_factor": 1.0, "end_factor": 0.2, "total_iters": 60}),
        ("cosine", {}, "CosineAnnealingLR", {"T_max": 60}),
        ("cosine", {"min_lr_ratio": 0.1}, "CosineAnnealingLR", {"T_max": 60, "eta_min": 2e-4}),
        ("cosine_with_restarts", {"num_cycles": 3}, "CosineAnnealingWarmRestarts", {"T_0": 20}),
        (
            "cosine_with_restarts", {"num_cycles": 3, "min_lr_ratio": 0.1}, "CosineAnnealingWarmRestarts",
            {"T_0": 20, "eta_min": 2e-4},
        ),
        ("polynomial", {"power": 2.5}, "PolynomialLR", {"total_iters": 60, "power": 2.5}),
        ("one_cycle", {"min_lr_ratio": 4e-6}, "OneCycleLR", {"max_lr": 2e-3, "total_steps": 60}),
    ],
)  # fmt: skip
def test_every_step_has_the_rate_of_torch_s_scheduler(kind, params, scheduler, options):
    ours = [rate(step, kind, base=2e-3, steps=60, warmup=0, **params) for step in range(60)]
    assert ours == pytest.approx(of_torch(scheduler, 60, lr=2e-3, **options), rel=1e-9, abs=1e-15)
    assert len(set(ours)) > 15


def test_one_cycle_rises_for_as_long_as_the_warm_up_says():
    options = {"max_lr": 1.0, "total_steps": 50, "pct_start": 0.5, "final_div_factor": 1e4}
    ours = [rate(step, "one_cycle", steps=50, warmup=25, min_lr_ratio=4e-6) for step in range(50)]
    assert ours == pytest.approx(of_torch("OneCycleLR", 50, **options), rel=1e-9)
    assert (ours[0], ours[24]) == pytest.approx((1 / 25, 1.0))


def test_rex_is_the_formula_of_the_paper():
    for step in range(100):
        left = 1 - step / 100
        assert rate(step, "rex", warmup=0) == pytest.approx(left / (1 / 2 + left / 2), rel=1e-12)
    assert rate(50, "rex", warmup=0) == pytest.approx(2 / 3)  # above linear all the way
    assert rate(100, "rex", warmup=0) == 0.0


def test_restarts_follow_the_formula_after_a_warm_up_too():
    """diffusers' get_cosine_with_hard_restarts_schedule_with_warmup."""
    for step in range(10, 100):
        progress = (step - 10) / 90
        expected = 0.5 * (1 + math.cos(math.pi * (4 * progress % 1)))
        assert rate(step, "cosine_with_restarts", num_cycles=4) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "one_cycle", "rex"])
def test_it_ends_at_its_floor_and_stays_there_when_the_steps_were_lowered_below_the_current_one(kind):
    for step in (100, 150):
        assert rate(step, kind) == pytest.approx(0.0)
        assert rate(step, kind, base=2.0, min_lr_ratio=0.25) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "kind", ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "one_cycle", "rex"]
)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(kind, steps):
    for warmup in (0, 1, 5):
        rates = [rate(step, kind, steps=steps, warmup=warmup) for step in range(steps)]
        assert all(0 <= each <= 1 for each in rates)
        assert rates[0] > 0
