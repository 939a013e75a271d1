"""Noise levels have the densities of the formulas, on every family, cut off and shifted as asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lora_trainer.data.sampler import mix
from lora_trainer.noise_levels import NoiseLevels, shifted, unshifted
from lora_trainer.objective import Objective, draw

GRID = np.linspace(0, 1, 20001)
COUNT = 3000
LIMIT = 1.63 / math.sqrt(COUNT)  # Kolmogorov-Smirnov: exceeded by chance once in a hundred times; the seed is fixed


def integrated(density) -> np.ndarray:
    """The distribution function on GRID from a density."""
    middles = (GRID[1:] + GRID[:-1]) / 2
    steps = np.concatenate([[0], np.cumsum(density(middles))])
    return steps / steps[-1]


def logit_normal(mean: float, std: float) -> np.ndarray:
    """Esser et al. 2024, equation 19."""
    return integrated(
        lambda t: (
            np.exp(-((np.log(t / (1 - t)) - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi) * t * (1 - t))
        )
    )


def mode(s: float) -> np.ndarray:
    """Equation 20: t = f(v) for uniform v, and f falls."""
    v = np.linspace(0, 1, 200001)
    t = 1 - v - s * (np.cos(math.pi / 2 * v) ** 2 - 1 + v)
    return np.interp(GRID, t[::-1], 1 - v[::-1])


def cosmap() -> np.ndarray:
    """Equation 21."""
    return integrated(lambda t: 2 / (math.pi - 2 * math.pi * t + 2 * math.pi * t**2))


EXPECTED: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "logit_normal": ({}, logit_normal(0, 1)),
    "logit_normal with a mean": ({"mean": 0.3}, logit_normal(0.3, 1)),
    "logit_normal, narrower": ({"std": 0.8}, logit_normal(0, 0.8)),
    "uniform": ({"density": "uniform"}, GRID),
    "mode": ({"density": "mode"}, mode(1.29)),
    "mode, a little": ({"density": "mode", "scale": 0.81}, mode(0.81)),
    "mode, towards the ends": ({"density": "mode", "scale": -0.5}, mode(-0.5)),
    "cosmap": ({"density": "cosmap"}, cosmap()),
    "style": ({"density": "uniform", "bias": "style"}, GRID ** (1 / 3)),
    "content": ({"density": "uniform", "bias": "content"}, 1 - (1 - GRID) ** (1 / 3)),
    "content of logit_normal": ({"bias": "content"}, 1 - (1 - logit_normal(0, 1)) ** (1 / 3)),
}


def distance(drawn: np.ndarray, expected: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest difference between both distribution functions."""
    ordered = np.sort(drawn)
    there = np.interp(ordered, GRID, expected)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((there - steps[:-1]).max(), (steps[1:] - there).max()))


def drawn_from(levels: NoiseLevels, count: int = COUNT) -> np.ndarray:
    return np.array([draw(0, number, 0, (1,), levels).u.item() for number in range(count)])


@pytest.mark.parametrize("name", EXPECTED)
def test_each_density_is_the_one_of_the_formula_and_none_of_its_neighbours(name):
    options, expected = EXPECTED[name]
    drawn = drawn_from(NoiseLevels(**options))
    assert ((drawn > 0) & (drawn < 1)).all()
    assert distance(drawn, expected) < LIMIT
    others = {other: distance(drawn, function) for other, (_, function) in EXPECTED.items() if other != name}
    assert min(others.values()) > LIMIT, others


@pytest.mark.parametrize("name", EXPECTED)
def test_quantiles_and_shares_are_each_other_s_inverse(name):
    levels = NoiseLevels(**EXPECTED[name][0])
    for p in (0.0, 0.01, 0.3, 0.5, 0.77, 0.999, 1.0):
        assert levels.share_below(levels.quantile(p)) == pytest.approx(p, abs=1e-9)
    assert levels.quantile(0.0) < 2e-3
    assert levels.quantile(1.0) > 1 - 2e-3


@pytest.mark.parametrize("density", ["logit_normal", "uniform"])
def test_what_is_drawn_by_default_is_what_it_always_was_to_the_bit(density):
    generator = torch.Generator().manual_seed(mix(7, 3, 11, 2))
    drop = torch.rand((), generator=generator, dtype=torch.float64)
    u = torch.rand((), generator=generator) if density == "uniform" else torch.randn((), generator=generator).sigmoid()
    noise = torch.randn((2, 3, 3), generator=generator)
    found = draw(7, 11, 2, (2, 3, 3), NoiseLevels(density))
    assert (found.drop, found.u) == (float(drop), u)
    assert torch.equal(found.noise, noise)


# ---------------------------------------------------------------------- on the families
def times(model, levels: NoiseLevels, shape, count: int) -> np.ndarray:
    """What a family is trained at, from its own `corrupt`."""
    objective, x0 = Objective(0, levels), torch.zeros(1, *shape)
    found = []
    for iteration in range(count):
        draws = objective.draws(model, iteration, [0], shape)
        found.append(objective.corrupted(model, x0, draws, iteration, [0]).time.item())
    return np.array(found)


@pytest.mark.parametrize("density", ["logit_normal", "uniform", "mode", "cosmap"])
@pytest.mark.parametrize("arch", ["zimage", "flux2_klein_4b"])
def test_levels_that_are_cut_off_keep_the_shape_of_the_density_after_the_shift(arch, density, load_tiny):
    model = load_tiny(arch)
    k = 3.0 if arch == "zimage" else 1.0
    low, high = 0.35, 0.8
    drawn = times(model, NoiseLevels(density, low=low, high=high), (1, 1, 1), COUNT)
    assert low - 1e-6 <= drawn.min()
    assert drawn.max() <= high + 1e-6
    whole = EXPECTED[density][1]

    def after_shift(k):
        at = np.interp(GRID / (k - (k - 1) * GRID), GRID, whole)
        first, last = np.interp([low, high], GRID, at)
        return np.clip((at - first) / (last - first), 0, 1)

    assert distance(drawn, after_shift(k)) < LIMIT
    assert distance(drawn, after_shift(2.0)) > LIMIT
    squeezed = np.interp((GRID - low) / (high - low), GRID, whole)  # not squeezed into the range: cut
    assert distance(drawn, squeezed) > LIMIT or density == "uniform"


@pytest.mark.parametrize("arch", ["sd15"])
def test_steps_of_ddpm_are_cut_off_as_well(arch, load_tiny):
    drawn = times(load_tiny(arch), NoiseLevels("uniform", low=0.2, high=0.5), (1, 1, 1), 2000)
    assert (drawn.min(), drawn.max()) == (pytest.approx(200, abs=2), pytest.approx(499, abs=2))
    assert distance(drawn, np.clip((GRID * 1000 - 200) / 300, 0, 1)) > 0.1  # a step is no share
    assert np.abs(np.sort(drawn) - np.linspace(200, 500, 2000)).max() < 300 * 1.63 / math.sqrt(2000) + 1


def test_steps_of_ddpm_follow_the_chosen_density(load_tiny):
    drawn = times(load_tiny("sd15"), NoiseLevels("logit_normal"), (1, 1, 1), COUNT) / 1000
    assert distance(drawn, logit_normal(0, 1)) < LIMIT + 1e-3
    assert distance(drawn, GRID) > LIMIT + 1e-3


def test_a_chosen_shift_takes_the_place_of_the_model_s_own(load_tiny):
    model, u = load_tiny("zimage"), torch.tensor([0.25, 0.5])
    assert torch.allclose(model.shift_sigma(u), torch.tensor([0.5, 0.75]))
    model.chosen_shift = 1.0
    assert torch.equal(model.shift_sigma(u), u)
    model.chosen_shift = 7.0
    assert torch.allclose(model.shift_sigma(u), torch.tensor([0.7, 0.875]))


def pipeline_s_mu(arch: str, model, height: int, width: int) -> float:
    """mu as the pipeline computes it, for pixels."""
    config, tokens = model.pipe.scheduler.config, (height // 16) * (width // 16)
    if arch == "flux2_klein_4b":
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return compute_empirical_mu(image_seq_len=tokens, num_steps=50)
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )


@pytest.mark.parametrize("arch", ["flux1", "flux2_klein_4b", "qwen_image"])
def test_shifts_by_picture_size_are_those_of_the_pipeline_s_own_scheduler(arch, load_tiny):
    model = load_tiny(arch)
    assert model.refuse_shift_by_size() is None
    assert model.shift_of((1, 8, 8)) == 1.0
    model.shifts_by_size = True
    u = torch.tensor([0.1, 0.5, 0.9])
    for height, width in ((512, 512), (1024, 768)):
        side = 16 if arch == "flux2_klein_4b" else 8
        shape = (1, height // side, width // side)
        expected = model.pipe.scheduler.time_shift(pipeline_s_mu(arch, model, height, width), 1.0, u)
        assert torch.allclose(model.shift_sigma(u, shape), expected, atol=1e-6)
        other = model.pipe.scheduler.time_shift(pipeline_s_mu(arch, model, 768, 512), 1.0, u)
        assert not torch.allclose(model.shift_sigma(u, shape), other, atol=1e-3)


def test_a_scheduler_that_does_not_shift_by_size_says_so(load_tiny):
    assert "use_dynamic_shifting" in load_tiny("zimage").refuse_shift_by_size()
    assert load_tiny("sd15").refuse_shift_by_size() is not None


def test_unshifting_undoes_the_shift():
    for k in (0.5, 1.0, 3.0):
        assert unshifted(shifted(0.3, k), k) == pytest.approx(0.3)
        assert (unshifted(0.0, k), unshifted(1.0, k)) == (0.0, 1.0)
