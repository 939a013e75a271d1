"""The formulas of all adapter types, and the same change in other factors."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.networks.factors import LORA_A, LORA_B, MAGNITUDE, Factors, stacked

LINEAR, CONV = (12, 8), (12, 8, 3, 3)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def example(kind: str, shape: tuple[int, ...] = LINEAR, rank: int = 2, scale: float = 1.5) -> Factors:
    m, n = shape[0], torch.Size(shape[1:]).numel()
    ones = (1,) * (len(shape) - 2)
    lora = {LORA_A: values(rank, *shape[1:]), LORA_B: values(m, rank, *ones, seed=1)}
    tensors = {
        "lora": lora,
        "dora": {**lora, MAGNITUDE: values(m, seed=2).abs()},
        "loha": {f"hada_w{i}_{x}": values(*s, seed=i) for i in (1, 2) for x, s in (("a", (m, rank)), ("b", (rank, n)))},
        "lokr-whole": {"lokr_w1": values(3, 2), "lokr_w2": values(4, n // 2)},
        "lokr-low": {"lokr_w1": values(3, 2), "lokr_w2_a": values(4, rank), "lokr_w2_b": values(rank, n // 2)},
        "dense": {"diff": values(*shape)},
    }[kind]
    return Factors(kind.partition("-")[0], tensors, scale, shape)


KINDS = ["lora", "dora", "loha", "lokr-whole", "lokr-low", "dense"]
WEIGHT = values(*CONV, seed=9)


@pytest.mark.parametrize("shape", [LINEAR, CONV], ids=["linear", "conv"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_equals_a_lora(kind, shape):
    factors = example(kind, shape)
    weight = WEIGHT if shape == CONV else WEIGHT[:, :, 0, 0]
    expected = factors.delta(weight)
    assert expected.shape == shape
    lora = factors.as_lora(weight)
    assert (lora.kind, lora.scale) == ("lora", 1.0)
    assert torch.allclose(lora.delta(), expected, atol=1e-5)
    assert lora.tensors[LORA_A].shape[1:] == shape[1:]
    assert lora.rank <= min(12, torch.Size(shape[1:]).numel())


def test_the_lora_of_low_ranks_is_no_larger_than_the_formula_shows():
    assert example("loha").as_lora().rank == 4
    assert example("lokr-low").as_lora().rank == 4
    assert example("lokr-whole").as_lora().rank == 8


@pytest.mark.parametrize("kind", KINDS)
def test_folding_the_scale_in_changes_nothing(kind):
    factors, weight = example(kind), WEIGHT[:, :, 0, 0]
    assert factors.baked().scale == 1.0
    assert torch.allclose(factors.baked().delta(weight), factors.delta(weight), atol=1e-5)
    assert not torch.allclose(factors.delta(weight), example(kind, scale=1.0).delta(weight), atol=1e-2)


def test_dora_sets_the_norm_of_every_output_row():
    factors, weight = example("dora"), WEIGHT[:, :, 0, 0]
    norms = (weight + factors.delta(weight)).norm(dim=1)
    assert torch.allclose(norms, factors.tensors[MAGNITUDE], atol=1e-5)


def test_loha_multiplies_two_products_elementwise():
    t = example("loha").tensors
    expected = 1.5 * (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    assert torch.allclose(example("loha").delta(), expected, atol=1e-6)


def test_loras_of_outputs_one_below_the_other_make_one_lora():
    parts = [example("lora"), example("lora", rank=3, scale=0.5)]
    joined = stacked(parts)
    assert joined.rank == 5
    assert torch.allclose(joined.delta(), torch.cat([part.delta() for part in parts]), atol=1e-6)
    assert stacked([example("lora"), example("loha")]) is None
