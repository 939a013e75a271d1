"""The memory estimate where several processes share the denoiser."""

from __future__ import annotations

import pytest

from lora_api.config import TrainerConfig
from lora_api.memory.estimate import denoiser_bytes, estimate_of, shapes_for
from lora_api.training import Precision


def estimate(processes: int, **blocks):
    config = TrainerConfig.model_validate(
        {
            "model": {"arch": "flux2_klein_4b", "name_or_path": "hf://a/b"},
            "datasets": [{"folder_path": "/d"}],
            "train": {"gradient_checkpointing": True},
            **blocks,
        }
    )
    shapes = shapes_for(config)
    return estimate_of(config, shapes, precision=Precision.BF16, processes=processes), denoiser_bytes(config, shapes, 4)


FULL = {"network": {"type": "full"}}


def test_a_model_that_is_trained_whole_lies_in_shares_with_one_block_whole():
    (one, whole), (eight, _) = estimate(1, **FULL), estimate(8, **FULL)
    assert eight.gradients == one.gradients // 8
    assert eight.optimizer == one.optimizer // 8
    block = 4 * (8 + 2 * 9) * 3072**2  # attention and feed-forward of both streams, fp32
    assert one.weights - eight.weights == pytest.approx(whole * 7 / 8 - block, rel=1e-4)


def test_adapters_stay_whole_over_a_base_in_shares():
    fsdp = {"train": {"parallelism": "fsdp"}}
    (one, _), (four, _) = estimate(1, **fsdp), estimate(4, **fsdp)
    assert (four.adapter, four.gradients, four.optimizer) == (one.adapter, one.gradients, one.optimizer)
    assert four.weights < one.weights / 2
    assert four.caching < one.caching


@pytest.mark.parametrize("blocks", [{}, {**FULL, "train": {"optimizer": "lion"}}])
def test_copies_take_as_much_on_each_of_many_as_on_one(blocks):
    assert estimate(8, **blocks) == estimate(1, **blocks)
