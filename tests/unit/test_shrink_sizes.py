"""What smaller means: the same samples in each step, fewer at once."""

from __future__ import annotations

import pytest

from lora_api.shrink import Passes, can_shrink, passes, piece_size
from lora_api.training import TrainConfig


def lives(**train: object) -> list[Passes]:
    """How a configuration is trained, from the manifest's way to the last."""
    config = TrainConfig.model_validate(train)
    times = 0
    found = [passes(config, 0)]
    while can_shrink(config, times):
        times += 1
        found.append(passes(config, times))
    return found


def test_micro_batches_are_halved_then_activations_are_recomputed() -> None:
    assert lives(batch_size=4) == [Passes(4, 1, False), Passes(2, 2, False), Passes(1, 4, False), Passes(1, 4, True)]


def test_odd_sizes_are_divided_by_what_divides_them() -> None:
    assert lives(batch_size=6, gradient_accumulation=2)[:3] == [
        Passes(6, 2, False),
        Passes(3, 4, False),
        Passes(1, 12, False),
    ]
    assert [each.batch_size for each in lives(batch_size=15)] == [15, 5, 1, 1]
    assert [each.batch_size for each in lives(batch_size=7)] == [7, 1, 1]


def test_every_stage_is_divided_as_often_and_the_largest_is_told() -> None:
    stages = [{"steps": 1, "batch_size": 2}, {"steps": 1, "batch_size": 9, "gradient_accumulation": 2}, {"steps": 1}]
    config = TrainConfig.model_validate({"batch_size": 4, "gradient_accumulation": 3, "steps": 3, "stages": stages})
    assert [passes(config, times) for times in range(4)] == [
        Passes(9, 2, False),
        Passes(3, 6, False),
        Passes(1, 6, False),
        Passes(1, 6, True),
    ]
    assert can_shrink(config, 2)
    assert not can_shrink(config, 3)


def test_a_batch_size_that_every_stage_replaces_plays_no_part() -> None:
    only = TrainConfig.model_validate({"batch_size": 64, "stages": [{"batch_size": 1}]})
    assert passes(only, 1) == Passes(1, 1, gradient_checkpointing=True)


def test_what_is_as_small_as_can_be_stays_so() -> None:
    assert lives(gradient_accumulation=4, gradient_checkpointing=True) == [Passes(1, 4, True)]
    assert lives() == [Passes(1, 1, False), Passes(1, 1, True)]


@pytest.mark.parametrize("batch_size", [*range(1, 65), 1000, 1024, 997])
def test_the_samples_of_a_step_stay_the_same_and_each_change_is_one(batch_size: int) -> None:
    found = lives(batch_size=batch_size, gradient_accumulation=3)
    assert {each.batch_size * each.gradient_accumulation for each in found} == {batch_size * 3}
    assert all(batch_size % each.batch_size == 0 for each in found), "a batch is divided into equal pieces"
    assert len(set(found)) == len(found)
    assert found[-1] == Passes(1, batch_size * 3, gradient_checkpointing=True)
    assert len(found) <= 12, "so many restarts at most"


def test_more_than_is_possible_asks_for_nothing_else() -> None:
    assert passes(TrainConfig(batch_size=4), 99) == Passes(1, 4, gradient_checkpointing=True)
    assert piece_size(1, 5) == 1
