"""The final adapter in every layout: each has the same effect, computed as its readers compute it."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lora_api.config import TrainerConfig
from lora_api.network import NetworkConfig
from lora_trainer.export import export_final, load_all_into_pipeline, load_into_pipeline
from lora_trainer.export_metadata import header_of
from lora_trainer.networks import add_adapter
from tests.trainer.jobs import answer, disturb
from tests.trainer.test_export import draw, fresh_pipeline
from tests.trainer.test_network_types import TYPES

FORMATS = ("diffusers", "peft", "comfyui", "kohya")


@pytest.fixture(scope="module")
def exported(tiny_model_folder, tmp_path_factory):
    """`exported(arch, type)`: (model with its adapter, folder with all formats); made once."""
    made = {}

    def export(arch: str, kind: str):
        if (arch, kind) not in made:
            from lora_trainer.families import family_for

            model = family_for(arch).load(tiny_model_folder(arch), dtype=torch.float32, device=torch.device("cpu"))
            adapter = add_adapter(model, NetworkConfig(**TYPES[kind]), seed=0)
            disturb(adapter)
            folder = tmp_path_factory.mktemp("final")
            export_final(model, adapter, folder, dtype=torch.float32, metadata={}, formats=FORMATS, weights_bin=True)
            made[arch, kind] = model, adapter, folder
        return made[arch, kind]

    return export


def changes(model, adapter) -> dict[str, torch.Tensor]:
    return {module: adapter.delta_weight(module) for module in adapter.modules}


def read_as_documented(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeltaW of every layer of a ComfyUI or kohya file, by the rules of its readers alone."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        stem = next(mark for mark in (".lora_", ".lokr_", ".hada_", ".diff", ".alpha") if mark in key)
        layer = key.partition(stem)[0]
        layers.setdefault(layer, {})[key.removeprefix(f"{layer}.")] = tensor
    return {layer: documented_change(held) for layer, held in layers.items()}


def documented_change(t: dict[str, torch.Tensor]) -> torch.Tensor:
    alpha = float(t["alpha"]) if "alpha" in t else None
    if "diff" in t:
        return t["diff"]
    if "hada_w1_a" in t:
        scale = 1.0 if alpha is None else alpha / t["hada_w1_b"].shape[0]
        return (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"]) * scale
    if "lokr_w1" in t:
        if "lokr_w2" in t:
            return torch.kron(t["lokr_w1"], t["lokr_w2"])  # alpha means nothing between two whole factors
        scale = 1.0 if alpha is None else alpha / t["lokr_w2_b"].shape[0]
        return torch.kron(t["lokr_w1"], t["lokr_w2_a"] @ t["lokr_w2_b"]) * scale
    down, up = (t.get("lora_A.weight"), t.get("lora_B.weight")) if "lora_A.weight" in t else (
        t["lora_down.weight"], t["lora_up.weight"],
    )  # fmt: skip
    return (up @ down) * (1.0 if alpha is None else alpha / down.shape[0])


def original_changes(model, adapter, place) -> dict[str, torch.Tensor]:
    """The change of every original layer, put together from the layers it was split into."""
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for module, delta in changes(model, adapter).items():
        groups.setdefault(place(module).name, {})[place(module).part] = delta
    return {name: torch.cat([parts[n] for n in sorted(parts)]) for name, parts in groups.items()}


# ---------------------------------------------------------------------- each format
@pytest.mark.parametrize("kind", TYPES)
def test_diffusers_loads_its_files_and_draws_the_same(arch, kind, exported, tiny_model_folder):
    model, adapter, folder = exported(arch, kind)
    files = [folder / "adapter.safetensors", *sorted(folder.glob("adapter.[dl]o*.safetensors"))]
    assert [file.name for file in files[1:]] == (
        ["adapter.dora.safetensors", "adapter.lokr.safetensors"] if kind == "mixed" else []
    )
    pipe = fresh_pipeline(tiny_model_folder(arch))
    assert load_all_into_pipeline(pipe, files) == adapter.module_count
    condition = model.encode_text("a red cube")
    expected, found = draw(model.pipe, condition), draw(pipe, condition)
    assert abs(found - expected).max() < 1e-4
    pipe.disable_lora()
    assert abs(draw(pipe, condition) - expected).max() > 1e-3


@pytest.mark.parametrize("kind", TYPES)
def test_peft_loads_its_folders_and_answers_the_same(kind, exported, load_tiny):
    from peft import PeftModel

    model, _, folder = exported("zimage", kind)
    expected = answer(model)
    fresh = load_tiny("zimage")
    base = answer(fresh)
    denoiser = fresh.denoiser
    for number, each in enumerate(sorted(folder.glob("peft*"))):
        PeftModel.from_pretrained(denoiser, each, adapter_name=f"a{number}")
    assert torch.allclose(answer(fresh), expected, atol=1e-5)
    assert not torch.allclose(base, expected, atol=1e-3)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("form", ["comfyui", "kohya"])
def test_original_layers_change_as_much_when_read_by_the_documented_rules(arch, kind, form, exported):
    model, adapter, folder = exported(arch, kind)
    tensors = load_file(folder / f"adapter.{form}.safetensors")
    found = read_as_documented(tensors)
    expected = original_changes(model, adapter, model.comfyui_layer if form == "comfyui" else model.original_layer)
    name = (lambda n: f"diffusion_model.{n}") if form == "comfyui" else (lambda n: "lora_unet_" + n.replace(".", "_"))
    assert found.keys() == {name(layer) for layer in expected}
    for layer, delta in expected.items():
        assert torch.allclose(found[name(layer)], delta, atol=1e-5), layer
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_names_are_those_of_the_original_model(exported):
    klein = load_file(exported("flux2_klein_4b", "lora")[2] / "adapter.comfyui.safetensors")
    assert {k.rsplit(".lora_")[0] for k in klein if "double" in k} == {
        f"diffusion_model.double_blocks.0.{each}_{part}"
        for each in ("img", "txt")
        for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
    }
    zimage = load_file(exported("zimage", "lora")[2] / "adapter.comfyui.safetensors")
    assert "diffusion_model.layers.0.attention.to_q.lora_A.weight" in zimage
    kohya = load_file(exported("zimage", "lora")[2] / "adapter.kohya.safetensors")
    assert {"lora_unet_layers_0_attention_qkv.alpha", "lora_unet_layers_0_attention_out.lora_up.weight"} <= kohya.keys()


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_diffusers_converts_the_other_layouts_of_what_it_knows(arch, kind, form, exported, tiny_model_folder):
    if kind == "lokr" and (form, arch) != ("comfyui", "zimage"):
        pytest.skip("diffusers has no converter for LoKr beside LoRA or whole changes")
    model, _, folder = exported(arch, kind)
    condition = model.encode_text("a red cube")
    pipe = fresh_pipeline(tiny_model_folder(arch))
    base = draw(pipe, condition)
    pipe.load_lora_weights(str(folder / f"adapter.{form}.safetensors"))
    expected = draw(model.pipe, condition)
    assert abs(draw(pipe, condition) - expected).max() < 1e-4
    assert abs(base - expected).max() > 1e-3


def test_a_split_layer_of_which_a_part_is_frozen_leaves_that_part_alone(load_tiny, tmp_path):
    model = load_tiny("flux2_klein_4b")
    network = NetworkConfig(linear=2, linear_alpha=3, modules=({"match": "*.attn.to_k", "freeze": True},))
    adapter = add_adapter(model, network, seed=0)
    disturb(adapter)
    export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=["comfyui"])
    found = read_as_documented(load_file(tmp_path / "adapter.comfyui.safetensors"))
    q, k, v = found["diffusion_model.double_blocks.0.img_attn.qkv"].chunk(3)
    assert k.abs().max() == 0
    assert torch.allclose(q, adapter.delta_weight("transformer_blocks.0.attn.to_q"), atol=1e-6)
    assert torch.allclose(v, adapter.delta_weight("transformer_blocks.0.attn.to_v"), atol=1e-6)


def test_the_plain_weights_are_those_of_the_first_format(exported):
    _, _, folder = exported("zimage", "lora")
    plain = torch.load(folder / "adapter_weights.bin", weights_only=True)
    tensors = load_file(folder / "adapter.safetensors")
    assert plain.keys() == tensors.keys()
    assert all(torch.equal(plain[key], tensors[key]) for key in tensors)


def test_the_number_format_changes_last_and_alpha_keeps_its_digits(load_tiny, tmp_path):
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=4, linear_alpha=33.3), seed=0)
    disturb(adapter)
    export_final(model, adapter, tmp_path, dtype=torch.bfloat16, metadata={}, formats=["kohya"])
    tensors = load_file(tmp_path / "adapter.kohya.safetensors")
    assert {t.dtype for k, t in tensors.items() if not k.endswith(".alpha")} == {torch.bfloat16}
    assert math.isclose(float(tensors["lora_unet_layers_0_feed_forward_w1.alpha"]), 33.3, rel_tol=1e-6)


# ---------------------------------------------------------------------- what headers say
def test_headers_name_what_other_tools_look_for(load_tiny, tmp_path):
    config = TrainerConfig.model_validate(
        {
            "trigger_word": "mascotxyz",
            "model": {"arch": "zimage", "name_or_path": "s3://models/z"},
            "network": {"linear": 4, "linear_alpha": 2},
            "datasets": [{"folder_path": "d", "resolution": [512, 768]}],
        }
    )
    facts = {"steps": 900, "samples": 12, "base_model_hash": "abc", "versions": {"torch": "2"}}
    metadata = header_of(facts, config, name="mascot", completed_at="2026-12-01T00:00:00Z")
    model = load_tiny("zimage")
    adapter = add_adapter(model, config.network, seed=0)
    disturb(adapter)
    file = export_final(model, adapter, tmp_path, dtype=torch.bfloat16, metadata=metadata)
    with safe_open(file, "pt") as reader:
        header = reader.metadata()
    assert header["modelspec.sai_model_spec"] == "1.0.0"
    assert (header["modelspec.architecture"], header["modelspec.resolution"]) == ("zimage/lora", "768x768")
    assert (header["modelspec.title"], header["modelspec.trigger_phrase"]) == ("mascot", "mascotxyz")
    assert (header["ss_network_dim"], header["ss_network_alpha"], header["ss_network_module"]) == (
        "4",
        "2",
        "networks.lora",
    )
    assert (header["ss_output_name"], header["ss_steps"], header["ss_base_model_version"]) == (
        "mascot",
        "900",
        "zimage",
    )
    assert (header["ss_learning_rate"], header["ss_sd_model_hash"]) == ("0.0001", "abc")
    assert json.loads(header["versions"]) == {"torch": "2"}
    data = file.read_bytes()
    content = data[8 + int.from_bytes(data[:8], "little") :]
    assert header["sshs_model_hash"] == hashlib.sha256(content).hexdigest()


def test_a_file_of_another_effect_would_be_noticed(exported, tiny_model_folder, tmp_path):
    """The comparison above fails for a file whose alpha is lost."""
    model, adapter, folder = exported("flux2_klein_4b", "lora")
    tensors = load_file(folder / "adapter.kohya.safetensors")
    wrong = read_as_documented({key: tensor for key, tensor in tensors.items() if not key.endswith(".alpha")})
    expected = original_changes(model, adapter, model.original_layer)
    assert not torch.allclose(
        wrong["lora_unet_single_blocks_0_linear2"], expected["single_blocks.0.linear2"], atol=1e-2
    )
    assert load_into_pipeline(fresh_pipeline(tiny_model_folder("flux2_klein_4b")), folder / "adapter.safetensors") == 16
