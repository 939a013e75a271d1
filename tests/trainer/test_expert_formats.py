"""Wan's adapters, of one expert and of two, in every layout and in checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from lora_api.network import NetworkConfig
from lora_api.training import TrainConfig
from lora_trainer.export import export_final, load_into_pipeline, portable_files
from lora_trainer.networks import add_adapter
from lora_trainer.networks.warm import warm_start
from lora_trainer.optimizers import build_optimizer
from lora_trainer.state import TrainState, pack, unpack
from tests.trainer.families import load_pipe
from tests.trainer.test_wan import latents_drawn

FORMATS = ("diffusers", "peft", "comfyui", "kohya")
MIXED = NetworkConfig(
    type="lora",
    linear=4,
    linear_alpha=6,
    lokr_full_rank=False,
    modules=(
        {"match": "*attn1*", "type": "dora"},
        {"match": "*.ffn.*", "type": "lokr", "linear": 2},
        {"match": "*attn2.to_q", "type": "loha", "linear": 2},
    ),
)
COMPONENTS = {"wan21": {"": "transformer"}, "wan22": {"_high_noise": "transformer", "_low_noise": "transformer_2"}}


@pytest.fixture(params=COMPONENTS)
def arch(request):
    return request.param


def disturbed(model, network):
    adapter = add_adapter(model, network, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return adapter


@pytest.mark.parametrize("network", [NetworkConfig(linear=4, linear_alpha=6), MIXED], ids=["lora", "mixed"])
def test_diffusers_draws_the_same_with_the_files_of_all_kinds(arch, network, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    adapter = disturbed(model, network)
    expected = latents_drawn(model.pipe, condition)
    export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=FORMATS)
    pipe = load_pipe(tiny_model_folder(arch))
    base, count = latents_drawn(pipe, condition), 0
    for ending, component in COMPONENTS[arch].items():
        names = [f"adapter{ending}{kind}.safetensors" for kind in ("", ".dora", ".lokr")]
        files = [tmp_path / name for name in names if (tmp_path / name).is_file()]
        assert len(files) == (3 if network is MIXED else 1)
        for number, file in enumerate(files):
            count += load_into_pipeline(pipe, file, name=f"a{number}", component=component)
        getattr(pipe, component).set_adapters([f"a{number}" for number in range(len(files))])
    assert count == adapter.module_count
    assert (latents_drawn(pipe, condition) - expected).abs().max() < 1e-4
    assert (base - expected).abs().max() > 1e-3


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
def test_diffusers_converts_the_layouts_of_the_original_model(arch, form, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    adapter = disturbed(model, NetworkConfig(linear=4, linear_alpha=6))
    expected = latents_drawn(model.pipe, condition)
    export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=(form,))
    pipe = load_pipe(tiny_model_folder(arch))
    for ending, component in COMPONENTS[arch].items():
        into = {"load_into_transformer_2": True} if component == "transformer_2" else {}
        pipe.load_lora_weights(load_file(tmp_path / f"adapter{ending}.{form}.safetensors"), adapter_name="a", **into)
    assert (latents_drawn(pipe, condition) - expected).abs().max() < 1e-4


def test_peft_loads_the_folders_of_each_expert(arch, load_tiny, tiny_model_folder, tmp_path):
    from peft import PeftModel

    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    adapter = disturbed(model, MIXED)
    expected = latents_drawn(model.pipe, condition)
    export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=("peft",))
    pipe = load_pipe(tiny_model_folder(arch))
    for ending, component in COMPONENTS[arch].items():
        folders = sorted(tmp_path.glob(f"peft{ending}*"))
        assert len(folders) == 4
        for folder in folders:
            PeftModel.from_pretrained(getattr(pipe, component), folder).merge_and_unload()
    assert (latents_drawn(pipe, condition) - expected).abs().max() < 1e-4


def test_a_checkpoint_has_both_experts_and_files_for_diffusers_where_it_is_none(arch, load_tiny, tmp_path):
    network = NetworkConfig(linear=4, linear_alpha=6)
    model, train = load_tiny(arch), TrainConfig(steps=1)
    adapter = disturbed(model, network)
    optimizer = build_optimizer(adapter.optimizer_groups(train.lr), train)
    files = pack(adapter, optimizer, TrainState(), {})
    (tmp_path / "a.safetensors").write_bytes(files["adapter.safetensors"])
    keys = load(files["adapter.safetensors"])
    assert {key.split(".")[0] for key in keys} == set(COMPONENTS[arch].values())
    with safe_open(str(tmp_path / "a.safetensors"), framework="pt") as reader:
        header = reader.metadata()
    portable = {f"portable{ending}.safetensors" for ending in COMPONENTS[arch]}
    assert set(portable_files(model, adapter)) == (portable if arch == "wan22" else set())
    assert ("lora_adapter_metadata" in header) == (arch == "wan21")
    if arch == "wan21":
        assert json.loads(header["lora_adapter_metadata"])["transformer.lora_alpha"] == 6
    fresh = add_adapter(load_tiny(arch), network, seed=5)
    unpack(files, fresh, build_optimizer(fresh.optimizer_groups(train.lr), train))
    assert all(torch.equal(tensor, fresh.state_dict()[key]) for key, tensor in adapter.state_dict().items())


@pytest.mark.parametrize("form", FORMATS)
def test_wan_begins_with_an_earlier_adapter_of_any_layout(form, load_tiny, tmp_path):
    network = NetworkConfig(linear=4, linear_alpha=6)
    model = load_tiny("wan21")
    adapter = disturbed(model, network)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=(form,))
    fresh_model = load_tiny("wan21")
    fresh = add_adapter(fresh_model, network, seed=3)
    assert warm_start(fresh_model, fresh, file).relative_error < 1e-5
    assert all(torch.allclose(fresh.delta_weight(m), adapter.delta_weight(m), atol=1e-5) for m in adapter.modules)
