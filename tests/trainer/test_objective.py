"""Noise, weights and losses as a configuration asks for them: on families, in the loop, and over interruptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_api.exit_codes import ExitCode
from lora_api.training import TrainConfig
from lora_trainer.losses import min_snr_weight
from lora_trainer.noise_levels import NoiseLevels
from lora_trainer.objective import Objective, take_noise_settings
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.test_loop import Rig
from tests.trainer.test_resume import same_training

SHAPE = (4, 6, 6)


def objective_of(model, **train: Any) -> Objective:
    return Objective.of(TrainConfig.model_validate(train), model)


# ---------------------------------------------------------------------- noise
def test_an_offset_is_one_number_for_each_channel_of_each_sample_and_normal(load_tiny):
    model = load_tiny("sd15")
    plain, offset = objective_of(model), objective_of(model, noise_offset=0.3)
    differences = []
    for iteration in range(300):
        before, after = (each.draws(model, iteration, [0, 1], SHAPE) for each in (plain, offset))
        assert [draw.u for draw in before] == [draw.u for draw in after]
        difference = torch.stack([b.noise for b in after]) - torch.stack([a.noise for a in before])
        assert difference.flatten(2).std(-1).max() < 1e-6
        differences.append(difference.mean((-1, -2)).flatten())
    values = torch.cat(differences)  # 2400 of them
    assert values.std().item() == pytest.approx(0.3, rel=0.05)
    assert values.mean().abs() < 0.03
    assert values.unique().numel() > 2000
    again = offset.draws(model, 299, [1], SHAPE)[0].noise
    assert torch.equal(again, offset.draws(model, 299, [0, 1], SHAPE)[1].noise), "by slot, whatever the batch"


@pytest.mark.parametrize("arch", ["sd15", "zimage"])
def test_perturbed_inputs_are_noisier_than_what_is_asked_for(arch, load_tiny):
    """Ning et al. 2023, algorithm 1: x_t from n + gamma xi, the target from n."""
    model = load_tiny(arch)
    x0 = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    plain, perturbed = objective_of(model), objective_of(model, input_perturbation=0.5)
    draws = plain.draws(model, 0, [0, 1], SHAPE)
    before, after = (each.corrupted(model, x0, draws, 0, [0, 1]) for each in (plain, perturbed))
    assert torch.equal(before.target, after.target)
    assert torch.equal(before.time, after.time)
    level = before.time if arch == "zimage" else (1 - model.noise_schedule.alphas_cumprod[before.time]).sqrt()
    added = (after.x_t - before.x_t) / level.view(-1, 1, 1, 1)
    assert added.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(after.x_t[1:], perturbed.corrupted(model, x0[1:], draws[1:], 0, [1]).x_t)


# ---------------------------------------------------------------------- weights on families
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_signal_to_noise_ratio_of_ddpm_is_that_of_diffusers(prediction, load_tiny):
    from diffusers.training_utils import compute_snr

    model, times = load_tiny("sd15"), torch.tensor([0, 17, 500, 999])
    model.noise_schedule.register_to_config(prediction_type=prediction)
    snr = compute_snr(model.noise_schedule, times)
    torch.testing.assert_close(model.snr(times), snr, rtol=1e-4, atol=1e-6)
    assert model.prediction == prediction
    found = objective_of(model, min_snr_gamma=5.0).weights(model, times)
    torch.testing.assert_close(found, min_snr_weight(snr, 5.0, prediction), rtol=1e-4, atol=1e-6)
    assert model.noise_level(times).tolist() == pytest.approx([0, 0.017, 0.5, 0.999])


def test_the_signal_to_noise_ratio_of_flow_matching_is_that_of_its_path(load_tiny):
    model, sigma = load_tiny("zimage"), torch.tensor([0.0, 0.2, 0.5, 1.0])
    assert model.snr(sigma).tolist() == pytest.approx([float("inf"), 16, 1, 0])
    assert objective_of(model, min_snr_gamma=5.0).weights(model, sigma).tolist() == pytest.approx([0, 0.2, 0.25, 0])
    assert objective_of(model, loss_weighting="sigma_sqrt").weights(model, sigma)[2] == 4
    assert objective_of(model, loss_type="huber", huber_schedule="exponential").deltas(model, sigma)[
        3
    ] == pytest.approx(0.1)
    assert objective_of(model, loss_type="huber", huber_schedule="snr").deltas(model, sigma)[2] == pytest.approx(0.325)


def test_nothing_is_weighed_unless_asked_for(load_tiny):
    model = load_tiny("zimage")
    objective = objective_of(model, loss_type="huber")
    assert objective == Objective(42, NoiseLevels())
    assert objective.weights(model, torch.tensor([0.5])) is None
    assert objective.deltas(model, torch.tensor([0.5])) is None


def test_what_a_family_can_not_do_is_refused_with_the_field_s_name(load_tiny, monkeypatch):
    def refused(model, **train):
        with pytest.raises(ValueError, match="train") as caught:
            take_noise_settings(model, TrainConfig.model_validate(train))
        return str(caught.value)

    zimage, unknown = load_tiny("zimage"), load_tiny("sd15")
    assert refused(zimage, timestep_dynamic_shift=True).startswith(
        "train.timestep_dynamic_shift: true, but the scheduler"
    )
    monkeypatch.setattr(type(unknown), "prediction", None)
    assert refused(unknown, timestep_shift=3).startswith("train.timestep_shift: ")
    assert refused(unknown, loss_weighting="cosmap").startswith("train.loss_weighting: ")
    assert "signal-to-noise" in refused(unknown, min_snr_gamma=5)
    assert refused(unknown, loss_type="huber", huber_schedule="snr").startswith("train.huber_schedule: ")
    take_noise_settings(zimage, TrainConfig(timestep_shift=2.0, min_snr_gamma=5.0))
    assert zimage.chosen_shift == 2.0


# ---------------------------------------------------------------------- in the loop
EVERYTHING: dict[str, Any] = {
    "loss_type": "pseudo_huber", "huber_schedule": "exponential", "loss_weighting": "cosmap", "noise_offset": 0.1,
    "input_perturbation": 0.1, "timestep_type": "mode", "min_timestep": 100, "max_timestep": 900,
    "content_or_style": "style", "timestep_shift": 2.0,
}  # fmt: skip


def test_the_reported_loss_is_the_one_without_weights(load_tiny):
    reported = {}
    for name, options in {"plain": {}, "weighed": {"loss_weighting": "sigma_sqrt"}}.items():
        rig = Rig(load_tiny, steps=1, batch_size=4, **options)
        rig.run()
        reported[name] = (rig.reporter.now.loss, rig.reporter.now.grad_norm)
    assert reported["plain"][0] == pytest.approx(reported["weighed"][0], rel=1e-6)
    assert reported["weighed"][1] > 1.5 * reported["plain"][1]


def test_weighed_accumulation_equals_one_batch(load_tiny):
    four = Rig(load_tiny, batch_size=4, **EVERYTHING).run()
    accumulated = Rig(load_tiny, gradient_accumulation=4, **EVERYTHING).run()
    plain = Rig(load_tiny, batch_size=4).run()
    assert max((four[key] - plain[key]).abs().max() for key in four) > 1e-4
    for key in four:
        torch.testing.assert_close(accumulated[key], four[key], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arch", "train"),
    [("zimage", EVERYTHING), ("sd15", {"min_snr_gamma": 5.0, "loss_type": "huber", "noise_offset": 0.1})],
)
def test_interruptions_change_no_bit_of_a_weighed_run(arch, train, tmp_path, tiny_model_folder):
    data = make_pictures(tmp_path / "data")
    whole = Job(tmp_path / "whole", tiny_model_folder(arch), data, tmp_path / "cache", arch)
    whole.change(train={"steps": 6, "gradient_accumulation": 2} | train)
    plain = whole.copy("plain")
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(stop_after=2) == ExitCode.PREEMPTED
    assert broken.run(crash_after=4) == 1
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)
    plain.config["train"] = {key: value for key, value in plain.config["train"].items() if key not in train}
    assert plain.run() == ExitCode.DONE
    assert not same_training(whole, plain)


def test_a_shift_that_the_model_lacks_ends_with_64_before_anything_is_encoded(tmp_path, tiny_model_folder):
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("flux1"), folder)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dynamic_shifting": False}))
    job = Job(tmp_path / "job", folder, make_pictures(tmp_path / "data"), tmp_path / "cache", "flux1")
    assert job.change(train={"timestep_dynamic_shift": True}).run() == ExitCode.CONFIGURATION
    assert job.word().message.startswith("config.train.timestep_dynamic_shift: true, but the scheduler of this model")
    assert not (tmp_path / "cache" / "tensors").exists()


@pytest.mark.parametrize(
    "levels",
    [
        NoiseLevels("uniform"),
        NoiseLevels("logit_normal"),
        NoiseLevels("logit_normal", mean=0.5),
        NoiseLevels("mode", bias="style"),
    ],
)
def test_draws_do_not_depend_on_the_format_that_another_thread_makes_the_default(levels):
    objective = Objective(seed=3, levels=levels, noise_offset=0.1)
    before = objective.draws(None, 5, [0, 1], (4, 8, 8))
    torch.set_default_dtype(torch.bfloat16)
    try:
        now = objective.draws(None, 5, [0, 1], (4, 8, 8))
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(before, now, strict=True):
        assert one.noise.dtype == other.noise.dtype == other.u.dtype == torch.float32
        assert torch.equal(one.noise, other.noise)
        assert torch.equal(one.u, other.u)
