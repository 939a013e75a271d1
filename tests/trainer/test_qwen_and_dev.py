"""Qwen-Image and FLUX.2 dev against their own diffusers pipelines, and training on them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from lora_api.exit_codes import ExitCode
from lora_api.network import NetworkConfig
from lora_trainer.export import export_final, load_into_pipeline
from lora_trainer.families import ModelError, family_for
from lora_trainer.networks import add_adapter
from tests.trainer.families import PROMPT, latent_error, load_pipe, record, velocity_errors
from tests.trainer.jobs import Job, make_pictures

NETWORKS = {"lora": NetworkConfig(linear=4, linear_alpha=10), "lokr": NetworkConfig(type="lokr", lokr_factor=4)}
CPU = torch.device("cpu")
WIDTH, HEIGHT = 96, 64
GUIDANCE = {"qwen_image": "true_cfg_scale", "flux2_dev": "guidance_scale"}


@pytest.fixture(params=["qwen_image", "flux2_dev"])
def arch(request):
    return request.param


def picture() -> torch.Tensor:
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.nn.functional.interpolate(coarse, size=(HEIGHT, WIDTH), mode="bilinear")


def spatial(arch, pipe):
    """From the tokens of a pipeline to latents (B, C, h, w)."""
    if arch == "qwen_image":
        return lambda x: pipe._unpack_latents(x, HEIGHT, WIDTH, pipe.vae_scale_factor).squeeze(2)
    return lambda x: x.permute(0, 2, 1).reshape(len(x), -1, HEIGHT // 16, WIDTH // 16)


@pytest.fixture
def wired(arch, load_tiny, tiny_model_folder, monkeypatch):
    model, pipe = load_tiny(arch), load_pipe(tiny_model_folder(arch))
    options = {"num_inference_steps": 4, "height": HEIGHT, "width": WIDTH, GUIDANCE[arch]: 1.0}
    return model, record(pipe, monkeypatch, spatial(arch, pipe), max_sequence_length=model.text_tokens, **options)


def test_velocity_is_exactly_what_the_pipeline_gives_its_scheduler(wired):
    model, recording = wired
    assert len(recording.steps) == 4
    assert max(velocity_errors(model, recording)) < 1e-5


def test_normalised_latents_are_exactly_what_the_pipeline_denoises(wired):
    model, recording = wired
    assert latent_error(model, recording) < 1e-5
    assert torch.allclose(model.denormalise(recording.last), recording.decoded, atol=1e-5)


def test_the_comparison_notices_a_wrong_sign_a_flipped_time_and_scaled_latents(wired):
    model, recording = wired
    assert max(velocity_errors(model, recording, sign=-1)) > 1
    assert max(velocity_errors(model, recording, flip_time=True)) > 1e-3
    assert latent_error(model, recording, scale=1.05) > 1e-2


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_samples_are_the_pictures_that_the_pipeline_draws(arch, guidance, load_tiny, tiny_model_folder):
    model = load_tiny(arch)
    size = {"width": WIDTH, "height": HEIGHT}
    ours = model.sample(
        model.encode_text(PROMPT), model.encode_text(""), **size, guidance_scale=guidance, steps=3, seed=5
    )
    options = {GUIDANCE[arch]: guidance} | ({"negative_prompt": ""} if arch == "qwen_image" else {})
    theirs = load_pipe(tiny_model_folder(arch))(
        prompt=PROMPT,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        max_sequence_length=model.text_tokens,
        **size,
        **options,
    ).images[0]
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


def test_a_caption_is_told_from_another_and_one_batch_takes_both(arch, load_tiny):
    model = load_tiny(arch)
    conditions = [model.encode_text(caption) for caption in ("", "a red cube", "a long caption " * 3)]
    x = torch.randn(3, *model.encode_pixels(picture()).shape)
    sigma = torch.tensor([0.2, 0.5, 0.8])
    together = model.velocity(x, sigma, model.collate(conditions))
    alone = [
        model.velocity(x[index : index + 1], sigma[index : index + 1], model.collate([condition]))[0]
        for index, condition in enumerate(conditions)
    ]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(together, alone, strict=True))
    swapped = model.velocity(x, sigma, model.collate(conditions[::-1]))
    assert (swapped[0] - together[0]).abs().max() > 1e-5


def test_encoders_that_were_freed_come_back_with_the_same_result(arch, load_tiny):
    model = load_tiny(arch)
    before = model.encode_pixels(picture()), model.encode_text(PROMPT)["embeds"]
    model.free_encoders()
    model.sample({"embeds": before[1]}, None, width=32, height=32, steps=1, guidance_scale=4.0, seed=0)
    assert torch.equal(model.encode_pixels(picture()), before[0])
    assert torch.equal(model.encode_text(PROMPT)["embeds"], before[1])


# ---------------------------------------------------------------------- adapters
@pytest.mark.parametrize("network", NETWORKS)
def test_an_adapter_starts_as_the_base_and_its_file_draws_the_same_in_a_fresh_pipeline(
    arch, network, load_tiny, tiny_model_folder, tmp_path
):
    model = load_tiny(arch)
    condition = {name: tensor[None] for name, tensor in model.encode_text("a red cube").items()}

    def draw(pipe):
        return pipe(
            prompt_embeds=condition["embeds"],
            num_inference_steps=2,
            width=WIDTH,
            height=HEIGHT,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            **{GUIDANCE[arch]: 1.0},
        ).images

    base = draw(model.pipe)
    adapter = add_adapter(model, NETWORKS[network], seed=0)
    assert torch.allclose(draw(model.pipe), base, atol=1e-5)
    for parameter in adapter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    expected = draw(model.pipe)
    assert (expected - base).abs().max() > 0.01
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    pipe = load_pipe(tiny_model_folder(arch))
    assert load_into_pipeline(pipe, file) == adapter.module_count
    assert (draw(pipe) - expected).abs().max() < 1e-5


def test_gradient_checkpointing_changes_neither_loss_nor_gradients(arch, load_tiny):
    results = []
    for checkpointing in (False, True):
        model = load_tiny(arch)
        adapter = add_adapter(model, NetworkConfig(linear=4), seed=0)
        for parameter in adapter.parameters():
            parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
        if checkpointing:
            model.enable_gradient_checkpointing()
        x0 = model.encode_pixels(picture())[None]
        v = model.velocity(x0, torch.tensor([0.4]), model.collate([model.encode_text(PROMPT)]))
        v.pow(2).mean().backward()
        results.append([parameter.grad for parameter in adapter.parameters()])
    assert all(gradient is not None for gradient in results[0]), "every layer that is trained has an effect"
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


def test_a_run_that_was_interrupted_ends_like_one_that_was_not(arch, tiny_model_folder, tmp_path):
    data = make_pictures(tmp_path / "data", [(64, 64), (64, 64), (96, 64)])
    whole = Job(tmp_path / "whole", tiny_model_folder(arch), data, tmp_path / "cache", arch, train={"steps": 5})
    whole.change(sample={"prompts": ["a cube"], "width": 32, "height": 32, "sample_steps": 2})
    broken = whole.copy("broken")
    assert whole.run() == ExitCode.DONE
    assert broken.run(crash_after=2) == 1
    assert broken.run(stop_after=4) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    first, second = whole.newest(), broken.newest()
    assert all(first[name] == second[name] for name in ("adapter.safetensors", "optimizer.safetensors"))
    assert whole.store.get("final/sample-00.png") == broken.store.get("final/sample-00.png")


# ---------------------------------------------------------------------- folders of the other model
def test_a_denoiser_with_the_other_kind_of_guidance_is_refused(arch, tiny_model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("flux2_klein_4b" if arch == "flux2_dev" else arch), folder)
    if arch == "flux2_dev":
        index = json.loads((folder / "model_index.json").read_text())
        index |= {"_class_name": "Flux2Pipeline"}
        index.pop("is_distilled")
        (folder / "model_index.json").write_text(json.dumps(index))
    else:
        config = folder / "transformer" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": True}))
    with pytest.raises(ModelError, match=r"guidance embedding, expected (one|none) \("):
        family_for(arch).load(folder, dtype=torch.float32, device=CPU)
