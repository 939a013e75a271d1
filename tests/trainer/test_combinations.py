"""Types, rules, layouts and warm starts on the families with a UNet, with convolutions and with text encoders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lora_api.network import NetworkConfig
from lora_api.training import TrainConfig
from lora_trainer.export import export_final, load_all_into_pipeline, load_into_pipeline
from lora_trainer.networks import add_adapter, train_all
from lora_trainer.networks.warm import warm_start
from lora_trainer.optimizers import build_optimizer
from lora_trainer.state import TrainState, pack, unpack
from tests.trainer.test_formats import original_changes, read_as_documented

SMALL = {"linear": 2, "linear_alpha": 3, "conv": 2, "conv_alpha": 1}
TYPES = {
    "dora": NetworkConfig(type="dora", **SMALL),
    "loha": NetworkConfig(type="loha", **SMALL),
    "lokr": NetworkConfig(type="lokr", lokr_full_rank=False, **SMALL),
    "mixed": NetworkConfig(
        **SMALL,
        modules=(
            {"match": "unet.mid_block.*", "type": "dora"},
            {"match": "up_blocks.*", "type": "lokr"},
            {"match": "*.attn1.to_q", "freeze": True},
        ),
        lokr_full_rank=False,
    ),
}
RULES = NetworkConfig(
    linear=2,
    modules=({"match": "text_encoder*.q_proj", "linear": 3, "lr": 0.01}, {"match": "*.v_proj", "freeze": True}),
)


def disturbed(adapter):
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return adapter


def drawn(model_or_pipe, condition) -> np.ndarray:
    options = {"num_inference_steps": 2, "width": 64, "height": 64, "guidance_scale": 1.0, "output_type": "latent"}
    names = {"embeds": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    embeds = {names[name]: tensor[None] for name, tensor in condition.items()}
    return model_or_pipe(**embeds, **options, generator=torch.Generator().manual_seed(0)).images.numpy()


def fresh_pipe(folder):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("arch", ["sd15", "sdxl"])
def test_every_type_is_exported_and_begins_another_job(arch, kind, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny(arch)
    condition = model.encode_text("a red cube")
    adapter = disturbed(add_adapter(model, TYPES[kind], seed=0))
    assert any(len(adapter.weight(name).shape) == 4 for name in adapter.modules)
    expected = drawn(model.pipe, condition)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=("diffusers", "peft"))
    files = [file, *sorted(tmp_path.glob("adapter.*.safetensors"))]
    files = list(dict.fromkeys(files))
    pipe = fresh_pipe(tiny_model_folder(arch))
    assert load_all_into_pipeline(pipe, files) == adapter.module_count
    assert abs(drawn(pipe, condition) - expected).max() < 1e-3
    if kind != "mixed":
        again = load_tiny(arch)
        fresh = add_adapter(again, TYPES[kind], seed=5)
        assert warm_start(again, fresh, tmp_path / "peft" / "adapter_model.safetensors").relative_error < 1e-5


def test_peft_loads_the_folder_of_a_unet(load_tiny, tiny_model_folder, tmp_path):
    from peft import PeftModel

    model = load_tiny("sdxl")
    condition = model.encode_text("a red cube")
    adapter = disturbed(add_adapter(model, TYPES["dora"], seed=0))
    expected = drawn(model.pipe, condition)
    export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=("peft",))
    pipe = fresh_pipe(tiny_model_folder("sdxl"))
    PeftModel.from_pretrained(pipe.unet, tmp_path / "peft").merge_and_unload()
    assert abs(drawn(pipe, condition) - expected).max() < 1e-3


@pytest.mark.parametrize("arch", ["sd15", "sdxl", "flux1"])
def test_rules_hold_for_text_encoders_and_warm_starts_bring_them_back(arch, load_tiny, tiny_model_folder, tmp_path):
    model = load_tiny(arch)
    model.encode_text("a red cube")
    adapter = disturbed(add_adapter(model, RULES, seed=0, text_encoders=True))
    ranks = {name.rpartition(".")[2]: layer.rank for name, layer in adapter.layers.items() if "text_encoder" in name}
    assert ranks == {"q_proj": 3, "k_proj": 2, "out_proj": 2}
    groups = adapter.optimizer_groups(0.1, denoiser_lr=0.05, text_lr=0.2)
    assert [round(group["lr_scale"], 3) for group in groups] == [0.5, 2.0, 0.1]
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={})
    assert load_into_pipeline(fresh_pipe(tiny_model_folder(arch)), file) == adapter.module_count
    again = load_tiny(arch)
    fresh = add_adapter(again, RULES, seed=5, text_encoders=True)
    assert warm_start(again, fresh, file).relative_error < 1e-5
    assert all(torch.allclose(fresh.delta_weight(m), adapter.delta_weight(m), atol=1e-5) for m in adapter.modules)
    without = load_tiny(arch)
    with pytest.raises(ValueError, match="layers are not in"):
        warm_start(without, add_adapter(without, NetworkConfig(linear=2), seed=0), file)


def test_a_checkpoint_with_text_encoders_is_a_file_that_diffusers_loads(load_tiny, tiny_model_folder, tmp_path):
    train = TrainConfig(steps=1)
    rule = {"match": "text_encoder*.q_proj", "linear": 4, "linear_alpha": 2}
    network = NetworkConfig(linear=2, linear_alpha=3, modules=(rule,))
    model = load_tiny("sdxl")
    adapter = disturbed(add_adapter(model, network, seed=0, text_encoders=True))
    files = pack(adapter, build_optimizer(adapter.optimizer_groups(train.lr), train), TrainState(), {})
    (tmp_path / "a.safetensors").write_bytes(files["adapter.safetensors"])
    pipe = fresh_pipe(tiny_model_folder("sdxl"))
    assert load_into_pipeline(pipe, tmp_path / "a.safetensors") == adapter.module_count
    assert {float(m.scaling["adapter"]) for m in pipe.text_encoder.modules() if hasattr(m, "scaling")
            if isinstance(m.scaling, dict)} == {1.5, 0.5}  # fmt: skip
    fresh = add_adapter(load_tiny("sdxl"), network, seed=5, text_encoders=True)
    unpack(files, fresh, build_optimizer(fresh.optimizer_groups(train.lr), train))
    assert all(torch.equal(tensor, fresh.state_dict()[key]) for key, tensor in adapter.state_dict().items())
    again = load_tiny("sdxl")
    begun = add_adapter(again, network, seed=7, text_encoders=True)
    assert warm_start(again, begun, tmp_path / "a.safetensors").relative_error < 1e-5


def test_a_unet_can_be_trained_whole(load_tiny, tmp_path):
    from diffusers import UNet2DConditionModel

    model = load_tiny("sd15")
    trained = train_all(model, NetworkConfig(type="full", ignore_if_contains=("unet.mid_block.",)))
    assert not any(name.startswith("mid_block") for name in trained.modules)
    file = export_final(model, trained, tmp_path, dtype=torch.float32, metadata={})
    assert file == tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    again = UNet2DConditionModel.from_pretrained(tmp_path / "unet").state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.denoiser.state_dict().items())


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
def test_layers_of_the_original_flux_change_as_much(form, load_tiny, tmp_path):
    model = load_tiny("flux1")
    adapter = disturbed(add_adapter(model, NetworkConfig(linear=2, linear_alpha=3), seed=0))
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=(form,))
    tensors = load_file(file)
    name = (lambda n: f"diffusion_model.{n}") if form == "comfyui" else (lambda n: "lora_unet_" + n.replace(".", "_"))
    changes = original_changes(model, adapter, model.original_layer)
    found = read_as_documented(tensors)
    assert found.keys() == {name(layer) for layer in changes}
    assert all(torch.allclose(found[name(layer)], delta, atol=1e-5) for layer, delta in changes.items())
    again = load_tiny("flux1")
    fresh = add_adapter(again, NetworkConfig(linear=8), seed=5)
    assert warm_start(again, fresh, file).relative_error < 1e-5


def test_diffusers_converts_the_double_blocks_of_the_original_flux(load_tiny, tiny_model_folder, tmp_path):
    network = NetworkConfig(
        linear=2, linear_alpha=3, ignore_if_contains=("single_",)
    )  # it knows their real widths only
    model = load_tiny("flux1")
    condition = model.encode_text("a red cube")
    adapter = disturbed(add_adapter(model, network, seed=0))
    expected = drawn(model.pipe, condition)
    file = export_final(model, adapter, tmp_path, dtype=torch.float32, metadata={}, formats=("kohya",))
    pipe = fresh_pipe(tiny_model_folder("flux1"))
    base = drawn(pipe, condition)
    pipe.load_lora_weights(load_file(file))
    assert abs(drawn(pipe, condition) - expected).max() < 1e-3
    assert abs(base - expected).max() > 1e-3
