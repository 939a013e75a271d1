"""Aspect buckets: never enlarged, never above the area, on the grid, near the picture's shape."""

from __future__ import annotations

import random

import pytest

from lora_trainer.data.buckets import Size, TooSmallError, bucket_of, fit

CASES = [
    (Size(512, 512), 512, Size(512, 512)),
    (Size(1024, 1024), 512, Size(512, 512)),
    (Size(300, 300), 512, Size(288, 288)),  # not enlarged to 304
    (Size(1920, 1080), 512, Size(672, 384)),
    (Size(1080, 1920), 512, Size(384, 672)),
    (Size(16, 16), 512, Size(16, 16)),
    (Size(4000, 16), 64, Size(256, 16)),
    (Size(16, 4000), 64, Size(16, 256)),
    (Size(40, 40), 32, Size(32, 32)),
]


@pytest.mark.parametrize(("picture", "resolution", "expected"), CASES, ids=str)
def test_pictures_get_the_bucket_that_people_expect(picture, resolution, expected):
    assert bucket_of(picture, resolution, 16) == expected


def random_pictures():
    rng = random.Random(7)
    for _ in range(3000):
        picture = Size(int(2 ** rng.uniform(4, 13)), int(2 ** rng.uniform(4, 13)))
        yield picture, rng.randint(32, 2048), rng.choice([8, 16, 32])


def test_every_bucket_lies_on_the_grid_below_the_area_and_inside_the_picture():
    for picture, resolution, multiple in random_pictures():
        if min(picture.width, picture.height) < multiple:
            continue
        bucket = bucket_of(picture, resolution, multiple)
        assert bucket.width % multiple == 0
        assert bucket.height % multiple == 0
        assert bucket.width >= multiple
        assert bucket.height >= multiple
        assert bucket.area <= max(resolution**2, multiple**2)
        assert bucket.width <= picture.width
        assert bucket.height <= picture.height


def test_no_larger_bucket_of_the_same_shape_would_have_fitted():
    for picture, resolution, multiple in random_pictures():
        if min(picture.width, picture.height) < 4 * multiple or resolution < 4 * multiple:
            continue
        bucket = bucket_of(picture, resolution, multiple)
        bigger = Size(bucket.width + multiple, bucket.height + multiple)
        inside = bigger.width <= picture.width and bigger.height <= picture.height
        assert not (inside and bigger.area <= min(resolution**2, picture.area) * 0.8)


def test_the_crop_covers_the_bucket_without_enlarging():
    for picture, resolution, multiple in random_pictures():
        if min(picture.width, picture.height) < multiple:
            continue
        bucket = bucket_of(picture, resolution, multiple)
        plan = fit(picture, bucket)
        assert bucket.width <= plan.resized.width <= picture.width
        assert bucket.height <= plan.resized.height <= picture.height
        assert 0 <= plan.left <= plan.resized.width - bucket.width
        assert 0 <= plan.top <= plan.resized.height - bucket.height


def test_turning_a_picture_turns_its_bucket():
    for picture, resolution, multiple in random_pictures():
        if min(picture.width, picture.height) < multiple:
            continue
        bucket = bucket_of(picture, resolution, multiple)
        turned = bucket_of(Size(picture.height, picture.width), resolution, multiple)
        assert turned.area == bucket.area


def test_a_picture_smaller_than_one_step_of_the_grid_is_refused_with_its_size():
    with pytest.raises(TooSmallError, match=r"10x10 pixels; at least 16x16"):
        bucket_of(Size(10, 10), 512, 16)
