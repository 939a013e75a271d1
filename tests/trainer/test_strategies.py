"""Whole jobs with every kind of network: exact resume, checkpoints and final files that other programs load."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from lora_api import layout
from lora_api.network import NetworkConfig
from lora_api.run import FinalManifest
from lora_trainer import checkpoint
from lora_trainer.export import export_final, load_all_into_pipeline, load_into_pipeline
from lora_trainer.networks import add_adapter, train_all
from tests.trainer.jobs import Job, answer, make_pictures, noisy_pictures, run_ranks
from tests.trainer.test_export import draw, fresh_pipeline
from tests.trainer.test_network_types import TYPES

NETWORKS = {
    "dora": {"type": "dora", "linear": 2, "linear_alpha": 4, "dropout": 0.1},
    "mixed": {
        "type": "lora",
        "linear": 2,
        "modules": [
            {"match": "*.to_[qk]", "type": "lokr"},
            {"match": "*.to_v", "type": "dora", "lr": 1e-2},
            {"match": "*.w2", "freeze": True},
            {"match": "*.linear_out", "freeze": True},
        ],
    },
    "full": {"type": "full", "ignore_if_contains": ["norm"]},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"), [(64, 64), (96, 64)])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    def make(arch="zimage", network="dora", **changes) -> Job:
        made = Job(
            tmp_path / "whole", tiny_model_folder(arch), data, cache, arch, train={"steps": 4}, save={"save_every": 2}
        )
        made.config["network"] = json.loads(json.dumps(NETWORKS[network]))
        if network == "mixed":
            rules = made.config["network"]["modules"]
            made.config["network"]["modules"] = [*rules[:2], rules[2] if arch == "zimage" else rules[3]]
        return made.change(**changes)

    return make


def final(job: Job) -> FinalManifest:
    return FinalManifest.model_validate_json(job.store.get(layout.FINAL_MANIFEST))


def test_an_interrupted_job_of_several_types_ends_with_the_same_bits(job, arch):  # of one: test_resume_matrix.py
    whole = job(arch, "mixed")
    assert whole.run() == 0, whole.word()
    broken = whole.copy("broken")
    assert broken.run(crash_after=3) == 1
    assert broken.run() == 0
    for name in (checkpoint.ADAPTER, checkpoint.OPTIMIZER):
        assert broken.newest()[name] == whole.newest()[name]
    first = load(whole.newest()[checkpoint.ADAPTER])
    start = load(whole.store.get(f"{layout.checkpoint_folder(2, 1)}{checkpoint.ADAPTER}"))
    assert all(torch.isfinite(tensor).all() for tensor in first.values())
    assert any(not torch.equal(first[key], start[key]) for key in first)


def test_a_rate_of_its_own_moves_its_layers_and_no_others(job):
    slow = job(train={"steps": 1})
    slow.config["network"] = {"linear": 2, "modules": [{"match": "layers.0.*", "lr": 1e-9}]}
    assert slow.run() == 0
    for key, tensor in load(slow.newest()[checkpoint.ADAPTER]).items():
        if "lora_B" in key:
            assert (tensor.abs().max() > 1e-6) == ("layers.1." in key), key


# ---------------------------------------------------------------------- checkpoints as they lie there
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "lokr-low", "loha", "mixed"])
def test_the_adapter_of_a_checkpoint_loads_in_diffusers_as_it_is(kind, job, tiny_model_folder, tmp_path):
    trained = job(train={"steps": 2, "lr": 0.05})
    trained.config["network"] = json.loads(NetworkConfig(**TYPES[kind]).model_dump_json())
    assert trained.run() == 0, trained.word()
    held = trained.newest()
    names = sorted(name for name in held if name.startswith("portable")) or [checkpoint.ADAPTER]
    assert (names == [checkpoint.ADAPTER]) == (kind not in ("loha", "mixed"))
    for name in names:
        (tmp_path / name).write_bytes(held[name])
    pipe, last = (fresh_pipeline(tiny_model_folder("zimage")) for _ in range(2))
    condition = {"embeds": torch.randn(7, 32, generator=torch.Generator().manual_seed(0))}
    base = draw(pipe, condition)
    load_all_into_pipeline(pipe, [tmp_path / name for name in names])
    (tmp_path / "final").mkdir()
    files = [file.name for file in final(trained).files if file.name.startswith("adapter.")]
    for name in files:
        (tmp_path / "final" / name).write_bytes(trained.store.get(layout.FINAL + name))
    load_all_into_pipeline(last, [tmp_path / "final" / name for name in files])
    drawn = draw(pipe, condition)
    assert abs(drawn - draw(last, condition)).max() < 1e-4
    assert abs(drawn - base).max() > 1e-3


# ---------------------------------------------------------------------- full fine-tuning
def test_all_weights_train_and_the_rest_of_the_pipeline_does_not(arch, load_tiny):
    model = load_tiny(arch)
    base = answer(model)
    trained = train_all(model, NetworkConfig(type="full"))
    assert torch.equal(answer(model), base)
    assert {id(p) for p in trained.parameters()} == {id(p) for p in model.denoiser.parameters()}
    x, sigma, conditioning = noisy_pictures(model)
    model.velocity(x, sigma, conditioning).pow(2).mean().backward()
    silent = [n for n, p in trained.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert all("pad_token" in name or "norm" in name or "bias" in name for name in silent), silent
    assert not any(p.requires_grad for p in model.pipe.vae.parameters())


def test_filters_frozen_parts_and_rates_hold_for_weights_too(load_tiny):
    rules = ({"match": "layers.1.*", "freeze": True}, {"match": "*.to_q", "lr": 2e-4})
    network = NetworkConfig(type="full", only_if_contains=("layers.",), modules=rules)
    trained = train_all(load_tiny("zimage"), network)
    assert {name.split(".")[1] for name in trained.modules} == {"0"}
    assert [len(g["params"]) for g in trained.optimizer_groups(1e-4)] == [len(trained.parameters()) - 1, 1]
    with pytest.raises(ValueError, match=r"'\*\.to_z' matches no layer; layers are "):
        train_all(load_tiny("zimage"), NetworkConfig(type="full", modules=({"match": "*.to_z", "lr": 1e-4},)))


def test_a_bf16_model_trains_in_fp32_and_draws(load_tiny):
    model = load_tiny("zimage", torch.bfloat16)
    condition = model.encode_text("a red cube")
    trained = train_all(model, NetworkConfig(type="full"))
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    model.sample(condition, None, width=32, height=32, steps=1, guidance_scale=0.0, seed=0)


def test_the_final_denoiser_is_a_component_that_diffusers_loads(arch, load_tiny, tmp_path):
    model = load_tiny(arch)
    trained = train_all(model, NetworkConfig(type="full"))
    for parameter in trained.parameters():
        parameter.data.mul_(1.01)
    file = export_final(model, trained, tmp_path, dtype=torch.float32, metadata={"arch": arch})
    assert file == tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    loaded = type(model.denoiser).from_pretrained(tmp_path / "transformer")
    expected = answer(model)
    fresh = load_tiny(arch)
    assert not torch.allclose(answer(fresh), expected, atol=1e-3)
    fresh.denoiser = fresh.forward_module = loaded.eval()
    assert torch.allclose(answer(fresh), expected, atol=1e-5)
    with safe_open(file, "pt") as reader:
        assert reader.metadata()["arch"] == arch


def test_a_job_of_full_fine_tuning_ends_in_a_component_folder(job, tmp_path):
    whole = job(network="full")
    assert whole.run() == 0, whole.word()
    manifest = final(whole)
    assert manifest.adapter == "transformer/diffusion_pytorch_model.safetensors"
    names = {file.name for file in manifest.files}
    assert {manifest.adapter, "transformer/config.json", "config.json", "metadata.yaml", "report.html"} == names
    trained = load(whole.newest()[checkpoint.ADAPTER])
    assert all(key.startswith("transformer.") for key in trained)


def test_weights_that_have_no_part_in_the_loss_are_trained_beside_the_others_on_two_ranks(job):
    train = {"steps": 2, "gradient_accumulation": 2, "optimizer": "adafactor", "lr": 1e-3}  # in shares: adamw only
    pair = job("qwen_image", "full", train=train)
    assert run_ranks(pair, [{}, {}]) == [0, 0], pair.word()
    alone = pair.copy("alone").change(train={"batch_size": 2})
    assert alone.run() == 0
    found, expected = (load(each.newest()[checkpoint.ADAPTER]) for each in (pair, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_job_writes_every_asked_format_and_names_it_in_the_manifest(job, tiny_model_folder, tmp_path):
    whole = job(network="dora", save={"formats": ["diffusers", "peft", "comfyui", "kohya"], "weights_bin": True})
    assert whole.run() == 0, whole.word()
    names = {file.name for file in final(whole).files}
    assert names == {
        "adapter.safetensors", "peft/adapter_model.safetensors", "peft/adapter_config.json", "adapter.comfyui.safetensors",
        "adapter.kohya.safetensors", "adapter_weights.bin", "config.json", "metadata.yaml", "report.html",
    }  # fmt: skip
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(whole.store.get(layout.FINAL + "adapter.safetensors"))
    assert load_into_pipeline(fresh_pipeline(tiny_model_folder("zimage")), file) == 16
    with safe_open(file, "pt") as reader:
        header = reader.metadata()
    assert (header["ss_network_dim"], header["ss_output_name"], header["ss_steps"]) == ("2", "mascot", "4")
    assert len(header["base_model_hash"]) == 32
    assert load_file(file)


def test_an_unknown_layer_pattern_ends_the_job_with_the_field(job):
    broken = job()
    broken.config["network"] = {"modules": [{"match": "*.to_z", "type": "lokr"}]}
    assert broken.run() == 64
    assert broken.word().message.startswith("config.network.modules[0].match: '*.to_z' matches no layer; layers are ")


def test_dropout_is_seeded_for_dora_too(load_tiny):
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(type="dora", linear=2, dropout=0.5), seed=0)
    for parameter in adapter.parameters():
        parameter.data.add_(0.1)
    torch.manual_seed(0)
    first = answer(model)
    torch.manual_seed(0)
    assert torch.equal(answer(model), first)
    assert not torch.equal(answer(model), first)
