"""Adapters of FLUX.1, Stable Diffusion 1.5 and SDXL, in denoisers with convolutions and in text encoders."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_api.network import NetworkConfig
from lora_trainer.export import export_final, load_into_pipeline
from lora_trainer.networks import add_adapter
from tests.trainer.classic import (
    CLASSIC,
    PROMPT,
    answer,
    as_arguments,
    assert_same_effect,
    disturb,
    draw,
    fresh_pipeline,
)

CONV = {"conv": 2, "conv_alpha": 3}
NETWORKS = {
    "lora": NetworkConfig(linear=4, linear_alpha=10, **CONV),
    "lokr": NetworkConfig(type="lokr", lokr_factor=4, **CONV),
    "lokr-low": NetworkConfig(type="lokr", lokr_full_rank=False, linear=2, linear_alpha=5, **CONV),
}


@pytest.fixture(params=CLASSIC)
def arch(request) -> str:
    return request.param


@pytest.mark.parametrize("name", NETWORKS)
def test_it_starts_as_the_base_model_and_a_fresh_pipeline_draws_with_the_file_what_was_drawn(
    arch, name, load_tiny, tiny_model_folder, tmp_path
):
    model = load_tiny(arch)
    condition = model.encode_text(PROMPT)
    base, picture = answer(model, condition), draw(model.pipe, **as_arguments(condition))
    adapter = add_adapter(model, NETWORKS[name], seed=0)
    assert torch.equal(answer(model, condition), base)
    disturb(adapter)
    expected = draw(model.pipe, **as_arguments(condition))
    adapter.set_enabled(False)
    assert torch.equal(answer(model, condition), base)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    pipe = fresh_pipeline(tiny_model_folder(arch))
    assert load_into_pipeline(pipe, file) == adapter.module_count
    assert_same_effect(draw(pipe, **as_arguments(condition)), expected, picture)


@pytest.mark.parametrize("kind", ["lora", "lokr-low"])
def test_convolutions_have_their_own_rank_and_alpha(kind, load_tiny):
    model = load_tiny("sd15")
    adapter = add_adapter(model, NETWORKS[kind], seed=0)
    disturb(adapter)
    unet = model.denoiser
    conv, linear = (
        unet.down_blocks[0].resnets[0].conv1,
        unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q,
    )
    assert (conv.r["default"], conv.scaling["default"]) == (2, 1.5)
    assert linear.scaling["default"] == 2.5
    assert unet.conv_in.__class__.__name__ == "Conv2d"
    without = add_adapter(load_tiny("sd15"), NetworkConfig(linear=4), seed=0)
    assert {module.rpartition(".")[2] for module in set(adapter.modules) - set(without.modules)} == {
        "conv1", "conv2", "conv_shortcut", "conv", "proj_in", "proj_out",
    }  # fmt: skip


def test_a_lora_file_without_its_header_draws_the_same(load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny("sd15")
    condition = model.encode_text(PROMPT)
    base = draw(model.pipe, **as_arguments(condition))
    adapter = add_adapter(model, NETWORKS["lora"], seed=0, text_encoders=True)
    disturb(adapter)
    expected = draw(model.pipe, **as_arguments(model.refreshed(condition, PROMPT)))
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})), bare)
    pipe = fresh_pipeline(tiny_model_folder("sd15"))
    assert load_into_pipeline(pipe, bare) == adapter.module_count
    assert_same_effect(draw(pipe, prompt=PROMPT), expected, base)


def test_layer_filters_take_unet_names(load_tiny):
    network = NetworkConfig(only_if_contains=("unet.up_blocks",), ignore_if_contains=("ff.net",))
    modules = add_adapter(load_tiny("sd15"), network, seed=0).modules
    assert modules
    assert all(name.startswith("up_blocks.") and "ff.net" not in name for name in modules)


# ---------------------------------------------------------------------- text encoders
LAYERS = {"flux1": 8, "sd15": 8, "sdxl": 4 + 8}  # the last layer of SDXL's first encoder is not read


@pytest.mark.parametrize("denoiser", [True, False], ids=["both", "text encoder alone"])
def test_a_text_encoder_adapter_starts_as_the_base_and_comes_back_from_the_file(
    arch, denoiser, load_tiny, tiny_model_folder, tmp_path
):
    model = load_tiny(arch)
    tokens = {"max_sequence_length": model.text_tokens} if arch == "flux1" else {}
    condition = model.encode_text(PROMPT)
    base = draw(model.pipe, **as_arguments(condition))
    model.free_encoders()
    adapter = add_adapter(model, NetworkConfig(linear=4, linear_alpha=8), seed=0, denoiser=denoiser, text_encoders=True)
    fresh = model.refreshed(condition, PROMPT)
    assert all(torch.equal(fresh[name], condition[name]) for name in condition)
    disturb(adapter)
    expected = draw(model.pipe, **as_arguments(model.refreshed(condition, PROMPT)))
    texts = [name for name in adapter.modules if name.startswith("text_encoder")]
    assert len(texts) == LAYERS[arch]
    assert denoiser == (len(texts) < adapter.module_count)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    with safe_open(file, "pt") as reader:
        keys, config = list(reader.keys()), json.loads(reader.metadata()["lora_adapter_metadata"])
    assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight" in keys
    assert config["text_encoder.lora_alpha"] == config["text_encoder.r"] == 4
    pipe = fresh_pipeline(tiny_model_folder(arch))
    assert load_into_pipeline(pipe, file) == adapter.module_count
    assert_same_effect(draw(pipe, prompt=PROMPT, **tokens), expected, base)


def test_gradients_reach_every_trained_layer_and_only_those(arch, load_tiny):
    model = load_tiny(arch)
    conditions = [model.encode_text(text) for text in (PROMPT, "")]
    model.free_encoders()
    adapter = add_adapter(model, NetworkConfig(linear=2), seed=0, denoiser=False, text_encoders=True)
    disturb(adapter)
    x0 = torch.randn(2, model.pipe.vae.config.latent_channels, 8, 8)
    corrupted = model.corrupt(x0, torch.randn_like(x0), torch.tensor([0.4, 0.6]))
    conditioning = model.conditioned(model.collate(conditions), [PROMPT, ""])
    (model.predict(corrupted.x_t, corrupted.time, conditioning) - corrupted.target).pow(2).mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapter.parameters())
    assert not any(p.requires_grad for p in model.denoiser.parameters())


def test_start_values_of_the_denoiser_do_not_depend_on_the_text_encoder(load_tiny):
    alone = add_adapter(load_tiny("sd15"), NetworkConfig(linear=2), seed=3).state_dict()
    model = load_tiny("sd15")
    both = add_adapter(model, NetworkConfig(linear=2), seed=3, text_encoders=True).state_dict()
    assert all(torch.equal(alone[key], both[key]) for key in alone)
    assert model.trained_text == ("text_encoder",)


def test_a_file_with_a_text_encoder_does_not_vanish_in_a_pipeline_without_one(load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny("sd15")
    adapter = add_adapter(model, NetworkConfig(linear=2), seed=0, text_encoders=True)
    disturb(adapter)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    other = tmp_path / "other.safetensors"
    save_file({key.replace("text_encoder.", "text_encoder_2."): value for key, value in load_file(file).items()}, other)
    pipe = fresh_pipeline(tiny_model_folder("sd15"))
    with pytest.raises(ValueError, match="holds an adapter for text_encoder_2, which the pipeline has not loaded"):
        load_into_pipeline(pipe, other)


def test_families_whose_loader_takes_no_text_encoder_refuse_it(load_tiny):
    with pytest.raises(ValueError, match=r"train\.train_text_encoder: true is not supported by ZImageModel"):
        add_adapter(load_tiny("zimage"), NetworkConfig(), seed=0, text_encoders=True)
