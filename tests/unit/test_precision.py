"""Which number format a run computes in."""

from __future__ import annotations

import pytest

from lora_api.config import TrainerConfig
from lora_api.precision import choose_precision
from lora_api.run import config_hash
from lora_api.training import Precision, TrainPrecision


@pytest.mark.parametrize(
    ("device", "bf16", "chosen"),
    [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("cpu", True, "fp32"), ("cpu", False, "fp32")],
)
def test_auto_takes_what_the_device_is_good_at_and_says_why(device, bf16, chosen):
    precision, reason = choose_precision(TrainPrecision.AUTO, device, bf16=bf16)
    assert precision is Precision(chosen)
    assert reason


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_format_that_is_asked_for_is_taken_on_every_device(asked, device):
    assert choose_precision(TrainPrecision(asked), device, bf16=False)[0] is Precision(asked)


def test_the_default_is_bf16_as_ever_and_no_part_of_the_hash():
    document = {"model": {"arch": "zimage", "name_or_path": "/m"}, "datasets": [{"folder_path": "/d"}]}
    plain, named, auto = (
        TrainerConfig.model_validate(document | {"train": train})
        for train in ({}, {"dtype": "bf16"}, {"dtype": "auto"})
    )
    assert plain.train.dtype == Precision.BF16
    assert config_hash(plain) == config_hash(named) != config_hash(auto)
