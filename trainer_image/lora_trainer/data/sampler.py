"""The order of training: which samples make up which batch, for ever, as a pure function.

Each bucket is an endless stream of its samples, shuffled anew in each epoch by (seed, bucket, epoch). A global batch is
the next `batch_size` samples of one bucket's stream; an epoch holds as many whole batches of a bucket as have become
full by its end, in an order shuffled by (seed, epoch). So every sample comes equally often whatever the sizes of the
buckets, no batch is short, and the batch of any position follows from its number alone: nothing has to be saved.
"""

from __future__ import annotations

import bisect
import hashlib
import random
import struct
from collections.abc import Hashable, Sequence
from functools import lru_cache


def mix(*numbers: int) -> int:
    """A 63-bit seed from integers; different tuples give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class BatchOrder:
    """Batches of sample numbers by position.

    Args:
        buckets: The bucket of each sample; sample numbers are positions in it.
        batch_size: Samples in a global batch: those of one forward pass over all ranks.
        seed: `train.seed`.
        first: Number of the first sample.
    """

    def __init__(self, buckets: Sequence[Hashable], batch_size: int, seed: int, first: int = 0) -> None:
        if not buckets or batch_size < 1:
            raise ValueError(f"{len(buckets)} samples in batches of {batch_size} can't be ordered")
        by_bucket: dict[Hashable, list[int]] = {}
        for sample, bucket in enumerate(buckets, first):
            by_bucket.setdefault(bucket, []).append(sample)
        self._streams = list(by_bucket.values())
        self._size = batch_size
        self._seed = seed
        self._epoch_order = lru_cache(maxsize=4)(self._shuffled_epoch)
        self._permutation = lru_cache(maxsize=4 + 4 * len(self._streams))(self._shuffled_bucket)

    def batch(self, position: int) -> tuple[int, ...]:
        """The sample numbers of the batch at `position` (from 0): `batch_size` of them, all of one bucket."""
        epoch = self.epoch_of(position)
        order = self._epoch_order(epoch)
        bucket, nth = order[position - self._batches_before(epoch)]
        first = (self._full_batches(bucket, epoch) + nth) * self._size
        return tuple(self._sample(bucket, place) for place in range(first, first + self._size))

    def epoch_of(self, position: int) -> int:
        """The epoch that a batch belongs to."""
        low, high = 0, 1
        while self._batches_before(high) <= position:
            low, high = high, high * 2
        return bisect.bisect_right(range(low, high), position, key=self._batches_before) + low - 1

    def _batches_before(self, epoch: int) -> int:
        return sum(self._full_batches(bucket, epoch) for bucket in range(len(self._streams)))

    def _full_batches(self, bucket: int, epochs: int) -> int:
        return epochs * len(self._streams[bucket]) // self._size

    def _shuffled_epoch(self, epoch: int) -> list[tuple[int, int]]:
        """(bucket, how many of its batches came before in this epoch) in the order of training."""
        order = [
            bucket
            for bucket in range(len(self._streams))
            for _ in range(self._full_batches(bucket, epoch + 1) - self._full_batches(bucket, epoch))
        ]
        random.Random(mix(self._seed, 1, epoch)).shuffle(order)  # noqa: S311 - an order, not a secret
        seen = dict.fromkeys(range(len(self._streams)), 0)
        numbered = []
        for bucket in order:
            numbered.append((bucket, seen[bucket]))
            seen[bucket] += 1
        return numbered

    def _sample(self, bucket: int, place: int) -> int:
        epoch, rest = divmod(place, len(self._streams[bucket]))
        return self._permutation(bucket, epoch)[rest]

    def _shuffled_bucket(self, bucket: int, epoch: int) -> list[int]:
        samples = list(self._streams[bucket])
        random.Random(mix(self._seed, 2, bucket, epoch)).shuffle(samples)  # noqa: S311 - as above
        return samples
