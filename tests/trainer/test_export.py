"""The adapter file: a pipeline that diffusers loads by itself must draw what the trainer drew."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_api.network import NetworkConfig
from lora_trainer.export import export_final, load_into_pipeline
from lora_trainer.networks import add_adapter

NETWORKS = {
    "lora": NetworkConfig(linear=4),
    "lora-alpha": NetworkConfig(linear=4, linear_alpha=10),
    "lokr-full": NetworkConfig(type="lokr"),
    "lokr-factor": NetworkConfig(type="lokr", lokr_factor=4),
    "lokr-low": NetworkConfig(type="lokr", lokr_full_rank=False, linear=2, linear_alpha=5),
}
METADATA = {"base_model": "tiny", "arch": "zimage", "trigger_word": "mascotxyz", "rank": "4"}


def trained(model, network, *, std: float = 0.3):
    """An adapter as after training."""
    adapter = add_adapter(model, network, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return adapter


def fresh_pipeline(folder):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, condition) -> np.ndarray:
    """The latents that the diffusers pipeline draws without guidance."""
    z_image = type(pipe).__name__ == "ZImagePipeline"
    embeds = [condition["embeds"]] if z_image else condition["embeds"][None]
    return (
        pipe(
            prompt_embeds=embeds,
            num_inference_steps=2,
            width=64,
            height=64,
            guidance_scale=0.0 if z_image else 1.0,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
        .images[0]
        .numpy()
    )


def without_metadata(file, target):
    save_file(load_file(file), target)
    return target


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fresh_pipeline_draws_with_the_file_what_the_trainer_drew(arch, name, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    base = draw(model.pipe, condition)
    adapter = trained(model, NETWORKS[name])
    expected = draw(model.pipe, condition)
    assert np.abs(expected - base).max() > 0.01
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata=METADATA)
    for path in (file, without_metadata(file, tmp_path / "bare.safetensors")):
        pipe = fresh_pipeline(tiny_model_folder(arch))
        assert load_into_pipeline(pipe, path) == adapter.module_count
        assert np.abs(draw(pipe, condition) - expected).max() < 1e-5, path.name


def test_the_file_holds_diffusers_keys_and_the_metadata_it_was_given(load_tiny, tmp_path):
    model = load_tiny("zimage")
    adapter = trained(model, NETWORKS["lora-alpha"])
    file = export_final(model, adapter, tmp_path / "final", dtype=torch.bfloat16, metadata=METADATA)
    assert file == tmp_path / "final" / "adapter.safetensors"
    assert [path.name for path in file.parent.iterdir()] == ["adapter.safetensors"], "nothing but the file is left"
    with safe_open(file, "pt") as reader:
        keys, header = list(reader.keys()), reader.metadata()
        assert {reader.get_tensor(key).dtype for key in keys} == {torch.bfloat16}
    assert header.items() >= METADATA.items()
    assert "transformer.layers.0.attention.to_q.lora_A.weight" in keys
    config = json.loads(header["lora_adapter_metadata"])
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (4, 4)
    scaled = load_file(file)["transformer.layers.0.attention.to_q.lora_B.weight"]
    assert torch.equal(scaled, (adapter.state_dict()["layers.0.attention.to_q.lora_B.weight"] * 2.5).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_file_draws_nearly_the_same(dtype, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny("zimage")
    condition = model.encode_text("a red cube")
    base = draw(model.pipe, condition)
    adapter = trained(model, NETWORKS["lokr-low"])
    expected = draw(model.pipe, condition)
    file = export_final(model, adapter, tmp_path, dtype=dtype, metadata={})
    pipe = fresh_pipeline(tiny_model_folder("zimage"))
    load_into_pipeline(pipe, file)
    assert np.abs(draw(pipe, condition) - expected).max() < 0.1 * np.abs(expected - base).max()


def test_exporting_twice_gives_the_same_bytes_and_replaces_the_file(load_tiny, tmp_path):
    model = load_tiny("zimage")
    adapter = trained(model, NETWORKS["lora"])
    first = export_final(model, adapter, tmp_path, dtype=torch.bfloat16, metadata=METADATA).read_bytes()
    assert export_final(model, adapter, tmp_path, dtype=torch.bfloat16, metadata=METADATA).read_bytes() == first


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [(float("nan"), torch.float32, "is not finite"), (1e6, torch.float16, "does not fit into torch.float16")],
)
def test_weights_that_are_not_finite_are_refused_and_nothing_is_written(value, dtype, message, load_tiny, tmp_path):
    model = load_tiny("zimage")
    adapter = trained(model, NETWORKS["lora"])
    adapter.parameters()[3].data[0, 0] = value
    with pytest.raises(ValueError, match=message):
        export_final(model, adapter, tmp_path, dtype=dtype, metadata={})
    assert not list(tmp_path.iterdir())


def test_metadata_may_not_replace_what_loaders_read(load_tiny, tmp_path):
    model = load_tiny("zimage")
    with pytest.raises(ValueError, match="lora_adapter_metadata is written by the export itself"):
        export_final(
            model,
            trained(model, NETWORKS["lora"]),
            tmp_path,
            dtype=torch.float32,
            metadata={"lora_adapter_metadata": ""},
        )


# ---------------------------------------------------------------------- files that load without effect
def renamed(file, target, change):
    save_file({change(key): value for key, value in load_file(file).items()}, target)
    return target


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("base_model.model.", lambda key: key.replace("transformer.", "base_model.model.", 1)),
        ("unet.", lambda key: key.replace("transformer.", "unet.", 1)),
        ("unknown layers", lambda key: key.replace("layers.", "blocks.", 1)),
        ("one layer of another model", lambda key: key.replace("layers.1.", "layers.7.", 1)),
    ],
)
def test_layouts_that_a_pipeline_takes_without_effect_are_caught(
    layout, change, load_tiny, tiny_model_folder, tmp_path
):
    model = load_tiny("zimage")
    condition = model.encode_text("a red cube")
    file = export_final(model, trained(model, NETWORKS["lora"]), tmp_path, dtype=torch.float32, metadata={})
    foreign = renamed(file, tmp_path / "foreign.safetensors", change)
    pipe = fresh_pipeline(tiny_model_folder("zimage"))
    base = draw(pipe, condition)
    with pytest.raises(ValueError, match=r"foreign\.safetensors: "):
        load_into_pipeline(pipe, foreign)
    assert np.array_equal(draw(pipe, condition), base), "the refused adapter left no trace"


def test_a_layout_that_the_pipeline_does_convert_is_accepted(arch, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    adapter = trained(model, NETWORKS["lora-alpha"])
    expected = draw(model.pipe, condition)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    other = renamed(
        file, tmp_path / "other.safetensors", lambda key: key.replace("transformer.", "diffusion_model.", 1)
    )
    pipe = fresh_pipeline(tiny_model_folder(arch))
    assert load_into_pipeline(pipe, other) == adapter.module_count
    assert np.abs(draw(pipe, condition) - expected).max() < 1e-5


def test_the_adapter_of_another_family_is_refused(load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny("zimage")
    file = export_final(model, trained(model, NETWORKS["lora"]), tmp_path, dtype=torch.float32, metadata={})
    pipe = fresh_pipeline(tiny_model_folder("flux2_klein_4b"))
    with pytest.raises(ValueError, match=r"adapter\.safetensors: "):
        load_into_pipeline(pipe, file)


def test_a_file_without_an_adapter_is_refused(tiny_model_folder, tmp_path):
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(ValueError, match=r"empty\.safetensors: "):
        load_into_pipeline(fresh_pipeline(tiny_model_folder("zimage")), tmp_path / "empty.safetensors")
