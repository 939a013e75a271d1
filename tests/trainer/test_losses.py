"""Losses and weights against their formulas, written here once more, in double precision and one number at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lora_trainer.losses import loss_of, min_snr_weight, scheduled_delta, sigma_weight

KINDS = ("mse", "mae", "huber", "smooth_l1", "pseudo_huber")


def pair(shape=(3, 4, 6, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def one_value(d: float, kind: str, delta: float) -> float:
    huber = d * d / 2 if abs(d) <= delta else delta * (abs(d) - delta / 2)
    return {
        "mse": d * d,
        "mae": abs(d),
        "huber": huber,
        "smooth_l1": huber / delta,
        "pseudo_huber": math.sqrt(d * d + delta * delta) - delta,
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [0.1, 1.0])
def test_each_loss_is_the_mean_of_its_formula(kind, delta):
    prediction, target = pair()
    differences = (prediction.double() - target.double()).flatten().tolist()
    found = loss_of(prediction, target, kind=kind, delta=delta)
    assert found.trained.item() == pytest.approx(
        sum(one_value(d, kind, delta) for d in differences) / len(differences), rel=1e-5
    )
    assert found.raw is found.trained
    others = [loss_of(prediction, target, kind=other, delta=delta).trained.item() for other in KINDS if other != kind]
    same = {"huber", "smooth_l1"} if delta == 1 else set()
    assert kind in same or all(abs(found.trained.item() - other) > 1e-3 for other in others)


def test_huber_and_smooth_l1_are_those_of_torch():
    prediction, target = pair()
    for kind, module in (("huber", nn.HuberLoss(delta=0.3)), ("smooth_l1", nn.SmoothL1Loss(beta=0.3))):
        torch.testing.assert_close(
            loss_of(prediction, target, kind=kind, delta=0.3).trained, module(prediction, target)
        )


def test_plain_mean_squared_error_is_torch_s_own_to_the_bit():
    prediction, target = pair()
    assert torch.equal(loss_of(prediction, target).trained, nn.functional.mse_loss(prediction, target))
    half = prediction.bfloat16()
    assert torch.equal(loss_of(half, target).trained, nn.functional.mse_loss(half.float(), target))


def test_each_sample_has_its_own_delta_where_there_are_several():
    prediction, target = pair()
    deltas = torch.tensor([0.05, 0.5, 2.0])
    found = loss_of(prediction, target, kind="huber", delta=deltas).trained
    each = [
        loss_of(prediction[i : i + 1], target[i : i + 1], kind="huber", delta=float(deltas[i])).trained
        for i in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(each).mean())


# ---------------------------------------------------------------------- weights of samples
def test_weights_multiply_each_sample_s_loss_and_the_raw_loss_stays_without_them():
    prediction, target = pair()
    weights = torch.tensor([0.5, 2.0, 0.0])
    found = loss_of(prediction, target, weight_B=weights)
    losses = [((prediction[i] - target[i]) ** 2).mean().item() for i in range(3)]
    assert found.trained.item() == pytest.approx((0.5 * losses[0] + 2 * losses[1]) / 3, rel=1e-5)
    assert found.raw.item() == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_four_batches_of_one_weigh_like_one_batch_of_four():
    prediction, target = pair()
    weights, mask = torch.tensor([0.5, 2.0, 0.1]), torch.rand((3, 1, 6, 5), generator=torch.Generator().manual_seed(1))
    together = loss_of(prediction, target, weight_B=weights, mask=mask)
    apart = [
        loss_of(prediction[i : i + 1], target[i : i + 1], weight_B=weights[i : i + 1], mask=mask[i : i + 1])
        for i in range(3)
    ]
    torch.testing.assert_close(together.trained, torch.stack([each.trained for each in apart]).mean())
    torch.testing.assert_close(together.raw, torch.stack([each.raw for each in apart]).mean())


SNRS = (1e-3, 0.3, 1.0, 4.9, 5.0, 7.0, 1e4)


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weights_are_those_of_the_paper(gamma):
    snr = torch.tensor(SNRS)
    for prediction, factor in (("epsilon", lambda s: 1 / s), ("v_prediction", lambda s: 1 / (s + 1))):
        expected = [min(s, gamma) * factor(s) for s in SNRS]
        assert min_snr_weight(snr, gamma, prediction).tolist() == pytest.approx(expected, rel=1e-5)


def test_min_snr_weights_are_those_that_diffusers_training_scripts_take():
    snr = torch.tensor(SNRS)
    capped = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0]  # train_text_to_image.py
    torch.testing.assert_close(min_snr_weight(snr, 5.0, "epsilon"), capped / snr)
    torch.testing.assert_close(min_snr_weight(snr, 5.0, "v_prediction"), capped / (snr + 1))


def test_the_min_snr_weight_of_a_velocity_weighs_the_error_of_the_picture_by_min_snr():
    """The paper's argument on flow matching: an error e of the velocity is an error sigma e of x0 = x_t - sigma v."""
    x0, noise, error = torch.randn(3, 4, 4), torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    for sigma in (0.05, 0.3, 0.5, 0.95):
        x_t, velocity = (1 - sigma) * x0 + sigma * noise, noise - x0
        picture = x_t - sigma * (velocity + error)
        snr = ((1 - sigma) / sigma) ** 2
        expected = min(snr, 5.0) * (picture - x0).square().mean()
        found = min_snr_weight(torch.tensor([snr]), 5.0, "velocity")[0] * error.square().mean()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert (
            abs(min_snr_weight(torch.tensor([snr]), 5.0, "v_prediction")[0] / found * error.square().mean() - 1) > 1e-2
        )


def test_weights_at_the_ends_of_the_noise_levels_are_finite():
    ends = torch.tensor([0.0, math.inf])
    assert min_snr_weight(ends, 5.0, "epsilon").tolist() == [1, 0]
    assert min_snr_weight(ends, 5.0, "v_prediction").tolist() == [0, 0]
    assert min_snr_weight(ends, 5.0, "velocity").tolist() == [0, 0]
    assert scheduled_delta(ends, 0.1, "snr").tolist() == pytest.approx([0.1, 1.0])


def test_weights_by_sigma_are_those_of_sd3_s_training_script():
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    sigma = torch.tensor([0.01, 0.2, 0.5, 0.9, 1.0])
    for scheme in ("sigma_sqrt", "cosmap"):
        torch.testing.assert_close(sigma_weight(sigma, scheme), compute_loss_weighting_for_sd3(scheme, sigma))
    assert sigma_weight(torch.zeros(1), "sigma_sqrt").item() == pytest.approx(1e6)
    assert sigma_weight(sigma, "sigma_sqrt").tolist() == pytest.approx([1e4, 25, 4, 1 / 0.81, 1], rel=1e-5)
    expected = [2 / (math.pi - 2 * math.pi * s + 2 * math.pi * s * s) for s in (0.01, 0.2, 0.5, 0.9, 1.0)]
    assert sigma_weight(sigma, "cosmap").tolist() == pytest.approx(expected, rel=1e-5)


def test_deltas_fall_from_one_to_delta_with_the_noise():
    t = torch.tensor([0.0, 0.25, 1.0])
    expected = [math.exp(-x * -math.log(0.1)) for x in (0.0, 0.25, 1.0)]  # exp(-alpha t), alpha = -log delta
    assert scheduled_delta(t, 0.1, "exponential").tolist() == pytest.approx(expected, rel=1e-5)
    a = torch.tensor([0.9999, 0.5, 0.01])  # cumulative alphas: sigma = sqrt((1 - a) / a)
    sigma = ((1 - a) / a).sqrt()
    assert torch.allclose(scheduled_delta(a / (1 - a), 0.1, "snr"), (1 - 0.1) / (1 + sigma) ** 2 + 0.1, atol=1e-5)


# ---------------------------------------------------------------------- masks
def test_a_mask_weighs_latent_pixels_and_its_size_does_not_weigh_the_sample():
    prediction, target = pair((2, 4, 3, 3))
    mask = torch.zeros(2, 1, 3, 3)
    mask[0, 0, 1, 2], mask[1, 0] = 0.5, 1.0
    found = loss_of(prediction, target, mask=mask)
    first = ((prediction[0, :, 1, 2] - target[0, :, 1, 2]) ** 2).mean()
    second = ((prediction[1] - target[1]) ** 2).mean()
    torch.testing.assert_close(found.trained, (first + second) / 2)
    torch.testing.assert_close(found.raw, found.trained)


def test_values_outside_of_the_mask_have_no_gradient():
    prediction, target = pair((1, 4, 3, 3))
    prediction.requires_grad_()
    mask = torch.zeros(1, 1, 3, 3)
    mask[0, 0, 1, 1] = 1.0
    loss_of(prediction, target, mask=mask).trained.backward()
    assert prediction.grad[0, :, 1, 1].abs().min() > 0
    assert prediction.grad.abs().sum() == prediction.grad[0, :, 1, 1].abs().sum()


def test_a_mask_of_ones_changes_nothing():
    prediction, target = pair()
    plain = loss_of(prediction, target).trained
    torch.testing.assert_close(loss_of(prediction, target, mask=torch.ones(3, 1, 6, 5)).trained, plain)


def test_the_mask_of_a_clip_holds_for_all_of_its_frames():
    prediction, target = pair((2, 4, 3, 2, 2))
    mask = torch.tensor([[1.0, 0.0], [0.25, 0.0]]).expand(2, 1, 1, 2, 2)
    squared = (prediction - target).square()
    expected = (squared[..., 0, 0].mean() + 0.25 * squared[..., 1, 0].mean()) / 1.25
    torch.testing.assert_close(loss_of(prediction, target, mask=mask).trained, expected)
