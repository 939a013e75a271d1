"""Wan 2.1 and 2.2 against their own diffusers pipeline, and what is particular to clips and to two experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lora_api.network import NetworkConfig
from lora_trainer.export import export_files, load_into_pipeline
from lora_trainer.families import ModelError, family_for
from lora_trainer.networks import add_adapter
from lora_trainer.sampling import draw_samples
from tests.trainer.families import PROMPT, latent_error, load_pipe, record, velocity_errors

NETWORKS = {"lora": NetworkConfig(linear=4, linear_alpha=10), "lokr": NetworkConfig(type="lokr", lokr_factor=4)}
CPU = torch.device("cpu")


@pytest.fixture(params=["wan21", "wan22"])
def arch(request):
    return request.param


def clip(frames: int = 9, seed: int = 0) -> torch.Tensor:
    """(1, 3, frames, 64, 64) in [-1, 1]: smooth colours that move."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    still = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")
    return torch.stack([still.roll(2 * number, -1) for number in range(frames)], 2)


@pytest.fixture
def wired(arch, load_tiny, tiny_model_folder, monkeypatch):
    model = load_tiny(arch)
    pipe = load_pipe(tiny_model_folder(arch))
    options = {"num_inference_steps": 4, "height": 64, "width": 64, "num_frames": 9, "guidance_scale": 1.0}
    return model, record(pipe, monkeypatch, lambda x: x, max_sequence_length=model.text_tokens, **options)


def test_velocity_is_exactly_what_the_pipeline_gives_its_scheduler(wired, arch):
    model, recording = wired
    times = [sigma for *_, sigma in recording.steps]
    if arch == "wan22":
        assert min(times) < 0.875 < max(times), "both experts were asked"
    assert max(velocity_errors(model, recording)) < 1e-5


def test_normalised_latents_are_exactly_what_the_pipeline_denoises(wired):
    model, recording = wired
    assert latent_error(model, recording) < 1e-5
    assert torch.allclose(model.denormalise(recording.last), recording.decoded, atol=1e-5)


def test_the_comparison_notices_a_wrong_sign_a_flipped_time_scaled_latents_and_the_wrong_expert(wired, arch):
    model, recording = wired
    assert max(velocity_errors(model, recording, sign=-1)) > 1
    assert max(velocity_errors(model, recording, flip_time=True)) > 1e-3
    assert latent_error(model, recording, scale=1.05) > 1e-2
    if arch == "wan22":
        experts = model.denoiser
        experts.transformer, experts.transformer_2 = experts.transformer_2, experts.transformer
        assert min(velocity_errors(model, recording)) > 1e-2


def test_samples_are_the_frames_that_the_pipeline_draws(arch, load_tiny, tiny_model_folder):
    model = load_tiny(arch)
    options = {"width": 64, "height": 64, "guidance_scale": 3.0, "num_frames": 5}
    ours = model.sample_frames(model.encode_text(PROMPT), model.encode_text(""), **options, steps=3, seed=5)
    theirs = load_pipe(tiny_model_folder(arch))(
        prompt=PROMPT,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        max_sequence_length=model.text_tokens,
        output_type="pil",
        **options,
    ).frames[0]
    assert len(ours) == len(theirs) == 5
    assert max(np.abs(np.asarray(a, int) - np.asarray(b, int)).max() for a, b in zip(ours, theirs, strict=True)) <= 1


def test_frames_are_folded_by_four_after_the_first_and_a_picture_is_a_clip_of_one(arch, load_tiny):
    model = load_tiny(arch)
    assert model.encode_pixels(clip(9)).shape == (16, 3, 8, 8)
    assert model.encode_pixels(clip(1)).shape == (16, 1, 8, 8)
    assert torch.equal(model.encode_pixels(clip(1)[:, :, 0]), model.encode_pixels(clip(1)))


def test_captions_of_different_length_make_one_batch_and_only_their_own_tokens_are_kept(arch, load_tiny):
    model = load_tiny(arch)
    conditions = [model.encode_text(caption) for caption in ("", "a red cube", "a long caption " * 3)]
    assert [len(each["embeds"]) for each in conditions] == sorted({len(each["embeds"]) for each in conditions})
    x, sigma = torch.randn(3, 16, 2, 8, 8), torch.tensor([0.2, 0.95, 0.8])
    together = model.velocity(x, sigma, model.collate(conditions))
    for index, condition in enumerate(conditions):
        alone = model.velocity(x[index : index + 1], sigma[index : index + 1], model.collate([condition]))
        assert torch.allclose(together[index], alone[0], atol=1e-5)


def test_encoders_that_were_freed_come_back_with_the_same_result(load_tiny):
    model = load_tiny("wan21")
    before = model.encode_pixels(clip()), model.encode_text(PROMPT)["embeds"]
    model.free_encoders()
    options = {"width": 32, "height": 32, "steps": 1, "guidance_scale": 4.0, "seed": 0}
    model.sample({"embeds": before[1]}, None, **options)
    assert torch.equal(model.encode_pixels(clip()), before[0])
    assert torch.equal(model.encode_text(PROMPT)["embeds"], before[1])


def test_training_noise_levels_follow_the_flow_shift_of_the_scheduler(load_tiny):
    u = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert torch.allclose(load_tiny("wan21").shift_sigma(u), torch.tensor([0.0, 0.5, 0.75, 1.0]))


# ---------------------------------------------------------------------- adapters
def latents_drawn(pipe, condition, frames: int = 5) -> torch.Tensor:
    model_tokens = 64
    embeds = torch.zeros(1, model_tokens, condition["embeds"].shape[-1])
    embeds[0, : len(condition["embeds"])] = condition["embeds"]
    return pipe(
        prompt_embeds=embeds,
        num_inference_steps=4,
        width=64,
        height=64,
        num_frames=frames,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).frames


@pytest.mark.parametrize("network", NETWORKS)
def test_an_adapter_starts_as_the_base_and_its_files_draw_the_same_in_a_fresh_pipeline(
    arch, network, load_tiny, tiny_model_folder, tmp_path
):
    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    base = latents_drawn(model.pipe, condition)
    adapter = add_adapter(model, NETWORKS[network], seed=0)
    assert torch.allclose(latents_drawn(model.pipe, condition), base, atol=1e-5)
    for parameter in adapter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    expected = latents_drawn(model.pipe, condition)
    assert (expected - base).abs().max() > 0.01
    files = export_files(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    components = list(model.export_parts.values())
    pipe = load_pipe(tiny_model_folder(arch))
    count = sum(
        load_into_pipeline(pipe, file, component=component) for file, component in zip(files, components, strict=True)
    )
    assert count == adapter.module_count
    assert (latents_drawn(pipe, condition) - expected).abs().max() < 1e-5


def test_the_two_files_say_by_name_which_expert_they_are_for(load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny("wan22")
    adapter = add_adapter(model, NETWORKS["lora"], seed=0)
    for parameter in adapter.parameters():
        parameter.data.normal_(0, 0.3)
    files = export_files(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    assert [file.name for file in files] == ["adapter_high_noise.safetensors", "adapter_low_noise.safetensors"]
    condition = model.encode_text("a red cube")
    expected = latents_drawn(model.pipe, condition)
    pipe = load_pipe(tiny_model_folder("wan22"))
    for file, component in zip(files, ("transformer_2", "transformer"), strict=True):
        load_into_pipeline(pipe, file, component=component)
    assert (latents_drawn(pipe, condition) - expected).abs().max() > 1e-2, "exchanged files draw something else"


def test_one_expert_can_be_left_out(load_tiny, tmp_path):
    model = load_tiny("wan22")
    adapter = add_adapter(model, NetworkConfig(linear=2, only_if_contains=("transformer_2.",)), seed=0)
    files = export_files(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    assert [file.name for file in files] == ["adapter_low_noise.safetensors"]


def gradients(model, adapter, sigmas):
    generator = torch.Generator().manual_seed(3)
    x0 = torch.randn(len(sigmas), 16, 1, 8, 8, generator=generator)
    noise = torch.randn(x0.shape, generator=generator)
    sigma = torch.tensor(sigmas)
    s = sigma.view(-1, 1, 1, 1, 1)
    v = model.velocity((1 - s) * x0 + s * noise, sigma, model.collate([model.encode_text(PROMPT)] * len(sigmas)))
    loss = (v - (noise - x0)).pow(2).mean()
    loss.backward()
    return {name: parameter.grad for name, parameter in adapter.named_parameters()}


def test_each_expert_learns_from_its_own_noise_levels_and_the_other_gets_zero(load_tiny):
    for sigmas, learning in (
        ([0.9, 0.99], "transformer."),
        ([0.2, 0.8], "transformer_2."),
        ([0.2, 0.9], "transformer"),
    ):
        model = load_tiny("wan22")
        adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
        found = gradients(model, adapter, sigmas)
        for name, gradient in found.items():
            if ".lora_B." in name:
                assert bool(gradient.ne(0).any()) is name.startswith(learning), name
            assert gradient is not None


def test_gradient_checkpointing_changes_neither_loss_nor_gradients(arch, load_tiny):
    results = []
    for checkpointing in (False, True):
        model = load_tiny(arch)
        adapter = add_adapter(model, NetworkConfig(linear=4), seed=0)
        for parameter in adapter.parameters():
            parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
        if checkpointing:
            model.enable_gradient_checkpointing()
        results.append(gradients(model, adapter, [0.3, 0.95]))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_gradients_are_averaged_over_ranks_also_when_a_batch_asks_one_expert_only(load_tiny):
    """The averaging raises at the next step, when a parameter had no part in one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = load_tiny("wan22")
        adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
        plain = gradients(model, adapter, [0.9])
        for parameter in adapter.parameters():
            parameter.grad = None
        model.forward_module = torch.nn.parallel.DistributedDataParallel(model.denoiser)
        averaged = gradients(model, adapter, [0.9])
        assert all(torch.equal(plain[name], averaged[name]) for name in plain)
        gradients(model, adapter, [0.1])
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- clips as samples
def test_a_clip_is_saved_as_animation_and_as_sheet_of_frames(load_tiny, tmp_path):
    model = load_tiny("wan21")
    condition = model.encode_text("a red cube")
    options = {"width": 32, "height": 32, "steps": 1, "guidance_scale": 1.0, "seed": 3}
    paths = draw_samples(model, [condition], None, tmp_path / "a", **options, num_frames=5, fps=8)
    assert [path.name for path in paths] == ["00.webp", "00.png"]
    with Image.open(paths[0]) as animation:
        assert animation.n_frames == 5
        animation.seek(1)
        animation.load()
        assert animation.info["duration"] == 125
    with Image.open(paths[1]) as sheet:
        assert sheet.size == (96, 64)
    again = draw_samples(model, [condition], None, tmp_path / "b", **options, num_frames=5, fps=8)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]
    single = draw_samples(model, [condition], None, tmp_path / "c", **options)
    assert [path.name for path in single] == ["00.png"]


# ---------------------------------------------------------------------- folders of the other model
def test_one_expert_and_two_are_told_apart(tiny_model_folder):
    with pytest.raises(ModelError, match="component 'transformer_2' is missing"):
        family_for("wan22").load(tiny_model_folder("wan21"), dtype=torch.float32, device=CPU)
    with pytest.raises(ModelError, match=r"found two experts, expected one; set model\.arch to wan22"):
        family_for("wan21").load(tiny_model_folder("wan22"), dtype=torch.float32, device=CPU)
