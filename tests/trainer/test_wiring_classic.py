"""FLUX.1, Stable Diffusion 1.5 and SDXL against their own diffusers pipelines, and DDPM against its formulas."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from lora_trainer.families import ModelError, family_for
from tests.trainer.classic import CLASSIC, PROMPT, fresh_pipeline

CPU = torch.device("cpu")
WIDTH, HEIGHT = 128, 64  # not square: a swapped size shows


@pytest.fixture(params=CLASSIC)
def arch(request) -> str:
    return request.param


def spatial(pipe, x):
    """Packed tokens of FLUX.1 as (B, C, h, w)."""
    return pipe._unpack_latents(x, HEIGHT, WIDTH, 8) if x.ndim == 3 else x


class Recording:
    """A run of a pipeline: each model output with the latents and the time it was for, and what the VAE got."""

    def __init__(self, folder, max_tokens: int) -> None:
        pipe = self.pipe = fresh_pipeline(folder)
        options = {"max_sequence_length": max_tokens}
        if hasattr(pipe, "unet"):  # Euler asks the UNet once at each step
            from diffusers import EulerDiscreteScheduler

            pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
            options = {}
        self.steps: list[tuple[torch.Tensor, torch.Tensor, float, float]] = []
        step, decode = pipe.scheduler.step, pipe.vae.decode

        def recorded_step(output, t, x, *args, **kwargs):
            if pipe.scheduler.step_index is None:
                pipe.scheduler._init_step_index(t)
            sigma = pipe.scheduler.sigmas[pipe.scheduler.step_index].item()
            result = step(output, t, x, *args, **kwargs)
            self.steps.append((spatial(pipe, output).clone(), spatial(pipe, x).clone(), float(t), sigma))
            self.last = spatial(pipe, result[0]).clone()
            return result

        def recorded_decode(z, *args, **kwargs):
            self.decoded = z.clone()
            return decode(z, *args, **kwargs)

        pipe.scheduler.step, pipe.vae.decode = recorded_step, recorded_decode
        pipe(
            prompt=PROMPT, num_inference_steps=3, height=HEIGHT, width=WIDTH, guidance_scale=1.0,
            generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip

    @torch.no_grad()
    def prediction_error(self, model, *, sign: float = 1, flip_time: bool = False) -> float:
        """Largest relative difference between our prediction and what the pipeline handed to its scheduler."""
        conditioning = model.collate([model.encode_text(PROMPT)])
        errors = []
        for output, x, t, sigma in self.steps:
            time, x_t = torch.tensor([sigma]), x
            if hasattr(self.pipe, "unet"):  # Euler's latents grow with sigma, those of DDPM keep their variance
                time, x_t = torch.tensor([int(t)]), x / (sigma**2 + 1) ** 0.5
            if flip_time:
                time = (999 if time.dtype == torch.int64 else 1) - time
            ours = sign * model.predict(x_t, time, conditioning)
            errors.append(((ours - output).abs().max() / output.abs().max()).item())
        return max(errors)

    def latent_error(self, model, scale: float = 1.0) -> float:
        """Relative difference between normalising what the VAE was given and the latents it was given for."""
        ours = model.normalise(self.decoded * scale)
        return ((ours - self.last).abs().max() / self.last.abs().max()).item()


def test_predictions_and_latents_are_exactly_those_of_the_pipeline_and_mistakes_show(
    arch, load_tiny, tiny_model_folder
):
    model = load_tiny(arch)
    recording = Recording(tiny_model_folder(arch), model.text_tokens)
    assert len(recording.steps) == 3
    assert recording.prediction_error(model) < 1e-5
    assert recording.latent_error(model) < 1e-5
    assert torch.allclose(model.denormalise(recording.last), recording.decoded, atol=1e-5)
    assert recording.prediction_error(model, sign=-1) > 1
    assert recording.prediction_error(model, flip_time=True) > 1e-3
    assert recording.latent_error(model, scale=1.05) > 1e-2
    if arch != "flux1":
        for _, _, t, sigma in recording.steps:
            a = model.noise_schedule.alphas_cumprod[int(t)].item()
            assert ((1 - a) / a) ** 0.5 == pytest.approx(sigma, rel=1e-4), (
                "training and drawing have one noise schedule"
            )


def test_the_sizes_that_sdxl_is_told_matter(load_tiny, tiny_model_folder, monkeypatch):
    model = load_tiny("sdxl")
    recording = Recording(tiny_model_folder("sdxl"), model.text_tokens)
    told = type(model)._added_conditions

    def swapped(self, x, conditioning):
        added = told(self, x, conditioning)
        return added | {"time_ids": added["time_ids"][:, [1, 0, 2, 3, 5, 4]]}

    monkeypatch.setattr(type(model), "_added_conditions", swapped)
    assert recording.prediction_error(model) > 1e-4


def test_samples_are_the_pictures_that_the_pipeline_draws(arch, load_tiny, tiny_model_folder):
    model = load_tiny(arch)
    conditions = model.encode_text(PROMPT), model.encode_text("")
    model.free_encoders()
    assert all(getattr(model.pipe, part) is None for part in model.text_parts)
    options = {"width": WIDTH, "height": HEIGHT, "guidance_scale": 3.0}
    ours = model.sample(*conditions, **options, steps=3, seed=5)
    tokens = {"max_sequence_length": model.text_tokens} if arch == "flux1" else {}
    theirs = fresh_pipeline(tiny_model_folder(arch))(
        prompt=PROMPT, num_inference_steps=3, generator=torch.Generator().manual_seed(5), **options, **tokens
    ).images[0]
    assert ours.size == (WIDTH, HEIGHT)
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1
    again = model.encode_text(PROMPT)
    assert all(torch.equal(again[name], conditions[0][name]) for name in again), "encoders come back as they were"


def test_an_empty_caption_is_zeros_where_the_model_was_trained_so(load_tiny):
    model = load_tiny("sdxl")
    assert all((tensor == 0).all() for tensor in model.encode_text("").values())
    assert load_tiny("sd15").encode_text("")["embeds"].abs().max() > 0


# ---------------------------------------------------------------------- DDPM
def with_scheduler(folder, target, **changes):
    """A copy of a model with another scheduler configuration."""
    shutil.copytree(folder, target)
    path = target / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noisy_latents_and_targets_are_those_of_the_formulas(prediction, tiny_model_folder, tmp_path):
    folder = with_scheduler(tiny_model_folder("sd15"), tmp_path / "model", prediction_type=prediction)
    model = family_for("sd15").load(folder, dtype=torch.float32, device=CPU)
    x0, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    corrupted = model.corrupt(x0, noise, torch.tensor([1e-9, 0.5, 0.9999, 1.0]))
    assert corrupted.time.tolist() == [0, 500, 999, 999]
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    a = (1 - betas).cumprod(0)[corrupted.time].view(-1, 1, 1, 1)
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
    assert torch.allclose(corrupted.x_t, x_t.float(), atol=1e-4)
    v = a.sqrt() * noise - (1 - a).sqrt() * x0
    expected = noise if prediction == "epsilon" else v.float()
    assert torch.allclose(corrupted.target, expected, atol=1e-4)
    if prediction == "v_prediction":  # what a sampler makes of it is the picture
        assert torch.allclose((a.sqrt() * x_t - (1 - a).sqrt() * corrupted.target).float(), x0, atol=1e-3)


def test_steps_are_uniform_unless_chosen_otherwise(load_tiny):
    assert [load_tiny(arch).density for arch in ("sd15", "sdxl", "flux1")] == ["uniform", "uniform", "logit_normal"]


def test_a_prediction_that_is_not_known_is_refused(tiny_model_folder, tmp_path):
    folder = with_scheduler(tiny_model_folder("sd15"), tmp_path / "model", prediction_type="sample")
    with pytest.raises(ModelError, match=r"found prediction_type sample, expected epsilon or v_prediction"):
        family_for("sd15").load(folder, dtype=torch.float32, device=CPU)


def test_an_inpainting_model_is_refused(tiny_model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("sd15"), folder)
    from diffusers import UNet2DConditionModel

    config = dict(UNet2DConditionModel.load_config(folder / "unet")) | {"in_channels": 9}
    UNet2DConditionModel.from_config(config).save_pretrained(folder / "unet")
    with pytest.raises(ModelError, match=r"found a UNet with 9 input channels, expected the VAE's 4"):
        family_for("sd15").load(folder, dtype=torch.float32, device=CPU)
