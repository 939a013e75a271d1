"""The order of training: fair, whole, reproducible from a number alone."""

from __future__ import annotations

from collections import Counter

import pytest

from lora_trainer.data.sampler import BatchOrder, mix

BUCKETS = ["a"] * 7 + ["b"] * 3 + ["c"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_every_sample_comes_equally_often_whatever_its_bucket(size):
    order = BatchOrder(BUCKETS, size, seed=1)
    batches = [order.batch(position) for position in range(11 * 4)]  # 4 x size whole epochs
    counts = Counter(sample for batch in batches for sample in batch)
    epochs = len(batches) * size / len(BUCKETS)
    assert max(counts.values()) - min(counts[sample] for sample in range(len(BUCKETS))) <= size + 1
    assert all(abs(counts[sample] - epochs) <= size + 1 for sample in range(len(BUCKETS)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_is_whole_and_comes_from_one_bucket(size):
    order = BatchOrder(BUCKETS, size, seed=1)
    for position in range(60):
        batch = order.batch(position)
        assert len(batch) == size
        assert len({BUCKETS[sample] for sample in batch}) == 1


def test_an_epoch_of_single_samples_is_a_permutation():
    order = BatchOrder(BUCKETS, 1, seed=3)
    for epoch in range(3):
        seen = [order.batch(epoch * 11 + position)[0] for position in range(11)]
        assert sorted(seen) == list(range(11))


def test_epochs_differ_and_seeds_differ():
    def first(seed, epoch):
        return [BatchOrder(BUCKETS, 1, seed).batch(epoch * 11 + p)[0] for p in range(11)]

    assert first(1, 0) != first(1, 1)
    assert first(1, 0) != first(2, 0)


def test_any_position_can_be_asked_for_first():
    whole = BatchOrder(BUCKETS, 2, seed=5)
    expected = [whole.batch(position) for position in range(100)]
    assert [BatchOrder(BUCKETS, 2, seed=5).batch(position) for position in reversed(range(100))] == expected[::-1]


def test_four_batches_of_one_are_one_batch_of_four_within_a_bucket():
    ones, fours = BatchOrder(["a"] * 6, 1, seed=9), BatchOrder(["a"] * 6, 4, seed=9)
    for position in range(20):
        assert fours.batch(position) == tuple(ones.batch(4 * position + place)[0] for place in range(4))


def test_a_dataset_smaller_than_a_batch_fills_it_over_several_epochs():
    order = BatchOrder(["a", "a", "a"], 8, seed=0)
    assert Counter(sample for position in range(3) for sample in order.batch(position)) == {0: 8, 1: 8, 2: 8}


def test_mixing_tells_tuples_apart():
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500
    assert mix(1, 2) != mix(2, 1)
    assert 0 <= mix(2**40, -1) < 2**63


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="0 samples"):
        BatchOrder([], 1, seed=0)
