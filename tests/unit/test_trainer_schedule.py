"""Learning rates at the steps where they turn."""

from __future__ import annotations

import pytest

from lora_trainer.schedule import learning_rate


def rate(step, kind="cosine", base=1.0, steps=100, warmup=10):
    return learning_rate(step, base=base, steps=steps, warmup=warmup, kind=kind)


def test_the_warm_up_rises_in_equal_parts_and_never_wastes_a_step_at_zero():
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])


def test_the_cosine_falls_from_the_base_to_zero():
    assert rate(10) == pytest.approx(1.0)
    assert rate(55) == pytest.approx(0.5)
    assert rate(100) == pytest.approx(0.0)
    assert rate(99) > 0


def test_it_stays_at_zero_when_the_steps_were_lowered_below_the_current_one():
    assert rate(150) == pytest.approx(0.0)


def test_the_constant_schedule_is_constant_after_the_warm_up():
    assert {rate(step, kind="constant") for step in (10, 50, 99)} == {1.0}


def test_without_warm_up_it_begins_at_the_base():
    assert rate(0, warmup=0) == 1.0


def test_a_warm_up_longer_than_the_run_does_not_divide_by_zero():
    assert rate(5, steps=5, warmup=10) == pytest.approx(0.6)
