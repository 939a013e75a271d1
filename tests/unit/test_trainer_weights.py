"""Datasets with weights: each gets its share, at every moment and while shares change, and a batch is still of one bucket."""

from __future__ import annotations

import pytest

from lora_api.order import WeightPoint, weight_at
from lora_trainer.data.sampler import BatchOrder
from lora_trainer.data.weights import Turns, WeightedOrder

CASES = {
    "one": [(5.0,)],
    "even": [(1.0, 1.0)],
    "three to one": [(3.0, 1.0)],
    "irrational": [(2**0.5, 1.0, 3**0.5)],
    "rare": [(1000.0, 1.0, 1.0)],
    "many": [tuple(float(n) for n in range(1, 9))],
    "elastic": [(1.0 - n / 600, n / 600) for n in range(601)],
    "back and forth": [(1.0 + n % 7, 3.0, 2.0 + n % 3) for n in range(700)],
    "a dataset that leaves": [(1.0, 1.0, 1.0)] * 100 + [(1.0, 0.0, 1.0)] * 300,
}


def weights_of(name):
    case = CASES[name]
    return lambda position: case[min(position, len(case) - 1)]


def gaps(name, length=600):
    """How far each dataset is from what its weights give it, after each batch, in batches."""
    weights, turns = weights_of(name), Turns(weights_of(name))
    count = len(weights(0))
    wanted, had = [0.0] * count, [0] * count
    for position in range(length):
        total = sum(weights(position))
        wanted = [w + share / total for w, share in zip(wanted, weights(position), strict=True)]
        had[turns.at(position)[0]] += 1
        yield [h - w for h, w in zip(had, wanted, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_after_any_number_of_batches_no_dataset_is_a_batch_away_from_its_share(name):
    assert max(abs(gap) for found in gaps(name) for gap in found) < 1.0


def test_a_random_choice_by_the_same_weights_would_not_pass():
    import random

    pick, had, worst = random.Random(0), 0, 0.0
    for position in range(600):
        had += pick.random() < 0.75
        worst = max(worst, abs(had - 0.75 * (position + 1)))
    assert worst > 5


def test_the_turns_of_three_to_one_are_spread_evenly():
    turns = Turns(weights_of("three to one"))
    chosen = [turns.at(position)[0] for position in range(40)]
    assert all(chosen[begin : begin + 4].count(0) == 3 for begin in range(0, 40, 4))


def test_a_dataset_of_weight_0_is_never_chosen():
    turns = Turns(weights_of("a dataset that leaves"))
    assert 1 not in {turns.at(position)[0] for position in range(100, 400)}
    assert 1 in {turns.at(position)[0] for position in range(100)}


def test_any_position_can_be_asked_for_first():
    turns = Turns(weights_of("elastic"))
    expected = [turns.at(position) for position in range(500)]
    assert [Turns(weights_of("elastic")).at(position) for position in (499, 250, 3)] == [
        expected[position] for position in (499, 250, 3)
    ]
    again = Turns(weights_of("elastic"))
    assert [again.at(position) for position in (499, 400, 0, 7)] == [expected[p] for p in (499, 400, 0, 7)]


def test_the_batches_of_a_dataset_are_those_it_has_alone_one_after_the_other_and_each_of_one_bucket():
    first, second = BatchOrder(["a"] * 5 + ["b"] * 3, 2, seed=1), BatchOrder(["a"] * 4, 2, seed=2, first=8)
    order, turns = WeightedOrder([first, second], Turns(weights_of("three to one"))), Turns(weights_of("three to one"))
    for position in range(60):
        dataset, number = turns.at(position)
        assert order.batch(position) == (first, second)[dataset].batch(number)
    assert {sample for position in range(60) for sample in order.batch(position)} == set(range(12))


# ------------------------------------------------------------------ weights over steps
def points(*pairs):
    return tuple(WeightPoint(at_step=step, value=value) for step, value in pairs)


def test_a_weight_goes_straight_from_point_to_point_and_is_level_outside():
    weight = points((100, 1.0), (300, 3.0), (400, 0.0))
    assert [weight_at(weight, step) for step in (0, 100, 150, 300, 350, 400, 9000)] == [1, 1, 1.5, 3, 1.5, 0, 0]


def test_a_weight_of_one_point_is_that_for_ever():
    assert {weight_at(points((0, 2.5)), step) for step in (0, 1, 10**6)} == {2.5}
    assert WeightPoint(value=1.0).at_step == 0
