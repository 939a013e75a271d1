"""Every family against its own diffusers pipeline: a falling loss would not notice a wrong sign or a flipped time."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import pytest
import torch

from lora_api.network import NetworkConfig
from lora_trainer.families import ModelError, family_for
from lora_trainer.networks import add_adapter

PROMPT = "a photo of a red cube, ünïcode 漢字"


def picture(seed: int = 0, side: int = 64) -> torch.Tensor:
    """Smooth colours with an edge, (1, 3, side, side) in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 4, 4, generator=generator) * 2 - 1
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")


# ---------------------------------------------------------------------- the exact convention
@dataclass
class Recording:
    """What a pipeline run showed: each model output with the latents and sigma it was for, and what the VAE got."""

    steps: list[tuple[torch.Tensor, torch.Tensor, float]]
    last: torch.Tensor
    decoded: torch.Tensor


def to_spatial(x: torch.Tensor) -> torch.Tensor:
    """Packed tokens (B, S, C) of a square picture to (B, C, h, w); others as they are."""
    if x.ndim == 4:
        return x
    side = round(x.shape[1] ** 0.5)
    return x.permute(0, 2, 1).reshape(len(x), -1, side, side)


def record_pipeline(pipe, monkeypatch, max_tokens: int) -> Recording:
    steps, seen = [], {}
    scheduler, step, decode = pipe.scheduler, pipe.scheduler.step, pipe.vae.decode

    def recorded_step(output, t, x, *args, **kwargs):
        if scheduler.step_index is None:
            scheduler._init_step_index(t)
        sigma = scheduler.sigmas[scheduler.step_index].item()
        result = step(output, t, x, *args, **kwargs)
        steps.append((to_spatial(output).clone(), to_spatial(x).clone(), sigma))
        seen["last"] = to_spatial(result[0]).clone()
        return result

    def recorded_decode(z, *args, **kwargs):
        seen["z"] = z.clone()
        return decode(z, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "step", recorded_step)
        patch.setattr(pipe.vae, "decode", recorded_decode)
        off = 0.0 if type(pipe).__name__ == "ZImagePipeline" else 1.0
        pipe(
            prompt=PROMPT,
            num_inference_steps=4,
            height=64,
            width=64,
            guidance_scale=off,
            generator=torch.Generator().manual_seed(0),
            max_sequence_length=max_tokens,
        )
    return Recording(steps, seen["last"], seen["z"])


@pytest.fixture
def wired(arch, load_tiny, tiny_model_folder, monkeypatch):
    """A base model of ours and the recording of a pipeline that diffusers loaded by itself."""
    from diffusers import DiffusionPipeline

    model = load_tiny(arch)
    pipe = DiffusionPipeline.from_pretrained(tiny_model_folder(arch))
    pipe.set_progress_bar_config(disable=True)
    return model, record_pipeline(pipe, monkeypatch, model.text_tokens)


@torch.no_grad()
def velocity_error(model, recording: Recording, *, sign: float = 1, flip_time: bool = False) -> float:
    """Largest relative difference between our velocity and what the pipeline handed to its scheduler."""
    conditioning = model.collate([model.encode_text(PROMPT)])
    errors = []
    for output, x, sigma in recording.steps:
        sigma_b = torch.tensor([1 - sigma if flip_time else sigma])
        v = sign * model.velocity(x, sigma_b, conditioning)
        errors.append(((v - output).abs().max() / output.abs().max()).item())
    return max(errors)


def latent_error(model, recording: Recording, scale: float = 1.0) -> float:
    """Relative difference between normalising what the VAE was given and the latents it was given for."""
    ours = model.normalise(recording.decoded * scale)
    return ((ours - recording.last).abs().max() / recording.last.abs().max()).item()


def test_velocity_is_exactly_what_the_pipeline_gives_its_scheduler(wired):
    model, recording = wired
    assert len(recording.steps) == 4
    assert velocity_error(model, recording) < 1e-5


def test_normalised_latents_are_exactly_what_the_pipeline_denoises(wired):
    model, recording = wired
    assert latent_error(model, recording) < 1e-5
    z = model.denormalise(recording.last)
    assert torch.allclose(z, recording.decoded, atol=1e-5)


def test_the_comparison_notices_a_wrong_sign_a_flipped_time_and_scaled_latents(wired):
    model, recording = wired
    assert velocity_error(model, recording, sign=-1) > 1
    assert velocity_error(model, recording, flip_time=True) > 1e-3
    assert latent_error(model, recording, scale=1.05) > 1e-2


def test_samples_are_the_pictures_that_the_pipeline_draws(arch, load_tiny, tiny_model_folder):
    import numpy as np
    from diffusers import DiffusionPipeline

    model = load_tiny(arch)
    options = {"width": 64, "height": 64, "guidance_scale": 3.0}
    ours = model.sample(model.encode_text(PROMPT), model.encode_text(""), **options, steps=3, seed=5)
    pipe = DiffusionPipeline.from_pretrained(tiny_model_folder(arch))
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe(
        prompt=PROMPT,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        max_sequence_length=model.text_tokens,
        **options,
    ).images[0]
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


# ---------------------------------------------------------------------- encoding and caches
def test_encoded_pictures_and_captions_survive_a_cache_file_to_the_bit(arch, load_tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    model = load_tiny(arch)
    latents, condition = model.encode_pixels(picture()), model.encode_text(PROMPT)
    assert latents.dtype == torch.float32
    save_file({"latents": latents, **condition}, tmp_path / "cache.safetensors")
    cached = load_file(tmp_path / "cache.safetensors")
    assert torch.equal(cached["latents"], latents)
    x, sigma = torch.randn(1, *latents.shape), torch.tensor([0.3])
    direct = model.velocity(x, sigma, model.collate([condition]))
    again = model.velocity(x, sigma, model.collate([{name: cached[name] for name in condition}]))
    assert torch.equal(direct, again)


def test_encoders_that_were_freed_come_back_with_the_same_result(arch, load_tiny):
    model = load_tiny(arch)
    before = model.encode_pixels(picture()), model.encode_text(PROMPT)["embeds"]
    model.free_encoders()
    assert model.pipe.text_encoder is None
    assert model.pipe.vae.encoder is None
    model.sample({"embeds": before[1]}, None, width=32, height=32, steps=1, guidance_scale=4.0, seed=0)
    assert torch.equal(model.encode_pixels(picture()), before[0])
    assert torch.equal(model.encode_text(PROMPT)["embeds"], before[1])


def test_encoding_does_not_depend_on_autocast(arch, load_tiny):
    model = load_tiny(arch)
    latents, embeds = model.encode_pixels(picture()), model.encode_text(PROMPT)["embeds"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.encode_pixels(picture()), latents)
        assert torch.equal(model.encode_text(PROMPT)["embeds"], embeds)


def test_identities_follow_the_content_and_not_the_place(arch, tiny_model_folder, load_tiny, tmp_path):
    original = load_tiny(arch)
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny_model_folder(arch), copy)
    moved = family_for(arch).load(copy, dtype=torch.float32, device=torch.device("cpu"))
    assert (moved.latents_identity, moved.text_identity) == (original.latents_identity, original.text_identity)
    for part, field in (("vae", "latents_identity"), ("tokenizer", "text_identity")):
        config = next(path for path in sorted((copy / part).glob("*.json")))
        config.write_text(config.read_text() + "\n")
        changed = family_for(arch).load(copy, dtype=torch.float32, device=torch.device("cpu"))
        assert getattr(changed, field) != getattr(original, field)
    assert load_tiny(arch, torch.bfloat16).text_identity != original.text_identity


def test_large_files_are_named_by_pieces_from_all_over_them(tmp_path, monkeypatch):
    from lora_trainer.families import folder

    monkeypatch.setattr(folder, "WHOLE_FILE_BYTES", 4096)
    monkeypatch.setattr(folder, "PIECE_BYTES", 256)
    part = tmp_path / "vae"
    part.mkdir()
    content = bytearray(20_000)
    (part / "weights.safetensors").write_bytes(content)
    before = folder.content_identity(part, salt="")
    for position in (0, 5_830, 19_999):
        changed = bytearray(content)
        changed[position] = 1
        (part / "weights.safetensors").write_bytes(changed)
        assert folder.content_identity(part, salt="") != before
    (part / "weights.safetensors").write_bytes(content + b"\0")
    assert folder.content_identity(part, salt="") != before


def test_captions_of_different_length_make_one_batch(arch, load_tiny):
    model = load_tiny(arch)
    conditions = [model.encode_text(caption) for caption in ("", "a red cube", "a long caption " * 3)]
    x = torch.randn(3, *model.encode_pixels(picture()).shape)
    sigma = torch.tensor([0.2, 0.5, 0.8])
    together = model.velocity(x, sigma, model.collate(conditions))
    for index, condition in enumerate(conditions):
        alone = model.velocity(x[index : index + 1], sigma[index : index + 1], model.collate([condition]))
        assert torch.allclose(together[index], alone[0], atol=1e-5)


# ---------------------------------------------------------------------- training behaviour
def loss_of(model, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x0 = model.encode_pixels(picture())[None].repeat(2, 1, 1, 1)
    noise = torch.randn(x0.shape, generator=generator)
    sigma = torch.tensor([0.25, 0.75])
    s = sigma.view(-1, 1, 1, 1)
    v = model.velocity((1 - s) * x0 + s * noise, sigma, model.collate([model.encode_text(PROMPT)] * 2))
    return (v - (noise - x0)).pow(2).mean()


def test_every_base_weight_is_frozen(arch, load_tiny):
    model = load_tiny(arch)
    model.encode_text(PROMPT)
    for module in (model.denoiser, model.pipe.vae, model.pipe.text_encoder):
        assert not any(p.requires_grad for p in module.parameters())
        assert not any(child.training for child in module.modules())


def test_gradient_checkpointing_changes_neither_loss_nor_gradients(arch, load_tiny):
    results = []
    for checkpointing in (False, True):
        model = load_tiny(arch)
        adapter = add_adapter(model, NetworkConfig(linear=4, dropout=0.3), seed=0)
        for parameter in adapter.parameters():
            parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
        if checkpointing:
            model.enable_gradient_checkpointing()
        torch.manual_seed(7)
        loss = loss_of(model)
        loss.backward()
        results.append((loss.detach(), [p.grad for p in adapter.parameters()]))
    (plain, plain_grads), (checkpointed, checkpointed_grads) = results
    assert torch.equal(plain, checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(plain_grads, checkpointed_grads, strict=True))


def test_a_wrapper_in_forward_module_is_what_velocity_calls(arch, load_tiny):
    model = load_tiny(arch)
    calls = []

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            calls.append(1)
            return self.module(*args, **kwargs)

    expected = loss_of(model)
    model.forward_module = Wrapper(model.denoiser)
    assert torch.equal(loss_of(model), expected)
    assert calls == [1]


def test_training_noise_levels_follow_the_static_shift_of_the_scheduler(load_tiny):
    u = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert torch.allclose(load_tiny("zimage").shift_sigma(u), torch.tensor([0.0, 0.5, 0.75, 1.0]))
    assert torch.equal(load_tiny("flux2_klein_4b").shift_sigma(u), u)


# ---------------------------------------------------------------------- finding a family
def test_switching_the_family_takes_nothing_but_the_arch(tiny_model_folder):
    shapes = {}
    for name in ("flux2_klein_4b", "flux2_klein_9b", "zimage"):
        model = family_for(name).load(tiny_model_folder(name), dtype=torch.float32, device=torch.device("cpu"))
        adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
        loss_of(model).backward()
        assert all(p.grad is not None for p in adapter.parameters())
        shapes[name] = model.encode_pixels(picture()).shape
    assert shapes["flux2_klein_4b"] == shapes["flux2_klein_9b"] == (64, 4, 4)
    assert shapes["zimage"] == (16, 8, 8)


def test_an_unknown_arch_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"model\.arch: found 'dall-e', expected one of flux1, .*flux2_klein_4b, flux2_klein_9b, .*sd15, sdxl, .*zimage",
    ):
        family_for("dall-e")


# ---------------------------------------------------------------------- bad model folders
def load_folder(arch: str, folder):
    return family_for(arch).load(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"nowhere: found nothing, expected the folder of a diffusers pipeline \(zimage\)"
    ):
        load_folder("zimage", tmp_path / "nowhere")


def test_a_folder_without_an_index_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"found notes\.txt, expected model_index\.json"):
        load_folder("zimage", tmp_path)


def test_a_broken_index_is_reported(tmp_path):
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ModelError, match="not readable as JSON"):
        load_folder("zimage", tmp_path)


def test_the_model_of_another_family_is_refused_with_both_names(tiny_model_folder):
    with pytest.raises(
        ModelError, match=r"names the pipeline 'ZImagePipeline', but .* flux2_klein_4b expects Flux2Klein"
    ):
        load_folder("flux2_klein_4b", tiny_model_folder("zimage"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "vae"), "component 'vae' is missing; found .*transformer"),
        (
            lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink(),
            r"transformer: found config\.json, expected weights in \*\.safetensors",
        ),
        (
            lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights"),
            "ZImagePipeline could not be loaded",
        ),
    ],
)
def test_a_damaged_model_folder_says_what_is_wrong(damage, message, tiny_model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("zimage"), folder)
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_folder("zimage", folder)


def test_the_other_size_of_klein_is_refused(tiny_model_folder, tmp_path, monkeypatch):
    from lora_trainer.families import flux2

    width = json.loads((tiny_model_folder("flux2_klein_4b") / "transformer" / "config.json").read_text())
    monkeypatch.setitem(flux2.TEXT_WIDTH, "flux2_klein_9b", width["joint_attention_dim"])
    with pytest.raises(
        ModelError, match=r"found text width 48, that of flux2_klein_9b.*set model\.arch to flux2_klein_9b"
    ):
        load_folder("flux2_klein_4b", tiny_model_folder("flux2_klein_4b"))
