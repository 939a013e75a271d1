"""Beginning with an earlier adapter, of any tool: what it changed is what the new one begins with."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_api.network import NetworkConfig
from lora_trainer.export import export_final
from lora_trainer.networks import add_adapter, train_all, warm_start
from tests.trainer.jobs import Job, answer, disturb, make_pictures
from tests.trainer.test_network_types import TYPES

SAME = 1e-5


@pytest.fixture(scope="module")
def earlier(tiny_model_folder, tmp_path_factory):
    """`earlier(arch, type)`: (the changes it makes, the velocity with it, a folder with all its files)."""
    from lora_trainer.families import family_for

    made = {}

    def adapter(arch: str, kind: str = "lora"):
        if (arch, kind) not in made:
            model = family_for(arch).load(tiny_model_folder(arch), dtype=torch.float32, device=torch.device("cpu"))
            trained = add_adapter(model, NetworkConfig(**TYPES[kind]), seed=3)
            disturb(trained, std=0.1)
            folder = tmp_path_factory.mktemp("earlier")
            export_final(
                model,
                trained,
                folder,
                dtype=torch.float32,
                metadata={},
                formats=["diffusers", "peft", "comfyui", "kohya"],
            )
            made[arch, kind] = {m: trained.delta_weight(m) for m in trained.modules}, answer(model), folder
        return made[arch, kind]

    return adapter


@pytest.mark.parametrize(
    "network",
    [
        {"linear": 4, "linear_alpha": 6},
        {"linear": 4, "linear_alpha": 1},
        {"linear": 9, "linear_alpha": 3},
        {"type": "dora", "linear": 4},
        {"type": "dora", "linear": 7},
    ],
    ids=["same", "other-alpha", "higher-rank", "dora", "dora-higher-rank"],
)
def test_no_lower_rank_begins_with_exactly_the_earlier_change(arch, network, earlier, load_tiny):
    changes, velocity, folder = earlier(arch)
    model = load_tiny(arch)
    base = answer(model)
    adapter = add_adapter(model, NetworkConfig(**network), seed=0)
    result = warm_start(model, adapter, folder / "adapter.safetensors")
    assert result.layers == len(changes)
    assert result.relative_error < SAME
    assert torch.allclose(answer(model), velocity, atol=1e-4)
    assert not torch.allclose(base, velocity, atol=1e-3)
    model.velocity(torch.randn(1, *((16, 8, 8) if arch == "zimage" else (64, 4, 4))), torch.tensor([0.5]),
                   model.collate([model.encode_text("")])).sum().backward()  # fmt: skip
    assert all(p.grad.abs().max() > 0 for p in adapter.parameters()), "what was padded trains too"


def test_the_same_type_and_rank_is_a_copy_to_the_bit(load_tiny, tmp_path):
    model = load_tiny("zimage")
    first = add_adapter(model, NetworkConfig(linear=4), seed=0)
    disturb(first)
    file = export_final(model, first, tmp_path, dtype=torch.float32, metadata={})
    fresh = load_tiny("zimage")
    second = add_adapter(fresh, NetworkConfig(linear=4), seed=7)
    assert warm_start(fresh, second, file).relative_error == 0
    assert all(torch.equal(first.state_dict()[key], value) for key, value in second.state_dict().items())


def test_a_lower_rank_begins_with_the_nearest_change_and_says_how_far_off_it_is(earlier, load_tiny, caplog):
    changes, _, folder = earlier("zimage")
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=2, linear_alpha=5), seed=0)
    with caplog.at_level(logging.WARNING):
        result = warm_start(model, adapter, folder / "adapter.safetensors")
    lost = [torch.linalg.svdvals(delta)[2:].pow(2).sum() for delta in changes.values()]
    size = [delta.pow(2).sum() for delta in changes.values()]
    assert result.relative_error == pytest.approx(float((sum(lost) / sum(size)).sqrt()), rel=1e-4)
    assert f"relative error {result.relative_error:.3g}" in caplog.text


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr", "lokr-low", "mixed"])
def test_every_type_continues_itself(kind, earlier, load_tiny):
    _, velocity, folder = earlier("zimage", kind)
    if kind == "mixed":
        file = folder / "adapter.comfyui.safetensors"
        network = NetworkConfig(type="full")
        model = load_tiny("zimage")
        result = warm_start(model, train_all(model, network), file)
    else:
        file = folder / ("peft/adapter_model.safetensors" if kind == "loha" else "adapter.safetensors")
        model = load_tiny("zimage")
        result = warm_start(model, add_adapter(model, NetworkConfig(**TYPES[kind]), seed=0), file)
    assert result.relative_error < SAME
    assert torch.allclose(answer(model), velocity, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_a_kronecker_product_begins_with_the_nearest_one(kind, earlier, load_tiny):
    changes, _, folder = earlier("zimage", kind)
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(type="lokr", lokr_factor=4), seed=0)
    result = warm_start(model, adapter, folder / "adapter.safetensors")
    assert 0.1 < result.relative_error < 1, "nearer than no change at all, but not equal"
    module = "layers.0.attention.to_q"
    w1, w2 = (adapter.state_dict()[f"{module}.lokr_w{n}"] for n in (1, 2))
    residual = changes[module] - torch.kron(w1, w2)
    assert residual.norm() <= (changes[module] - torch.kron(w1 * 1.05, w2)).norm(), "a neighbour is no nearer"


def test_loha_takes_nothing_else(earlier, load_tiny):
    _, _, folder = earlier("zimage")
    model = load_tiny("zimage")
    with pytest.raises(ValueError, match="can't be turned into loha"):
        warm_start(model, add_adapter(model, NetworkConfig(type="loha"), seed=0), folder / "adapter.safetensors")


# ---------------------------------------------------------------------- other tools' files
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "lokr-low"])
@pytest.mark.parametrize("form", ["comfyui", "kohya", "peft"])
def test_every_format_we_write_is_read_back(arch, kind, form, earlier, load_tiny):
    _, velocity, folder = earlier(arch, kind)
    file = folder / ("peft/adapter_model.safetensors" if form == "peft" else f"adapter.{form}.safetensors")
    model = load_tiny(arch)
    result = warm_start(model, train_all(model, NetworkConfig(type="full")), file)
    assert result.relative_error < SAME
    assert torch.allclose(answer(model), velocity, atol=1e-4)


def foreign(arch: str, rank: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    """Layouts of other tools for one fused (or plain) attention layer, with the change they mean."""
    name = {"zimage": "layers.0.attention.to_q", "flux2_klein_4b": "double_blocks.0.img_attn.qkv"}[arch]
    rows, flat = (64 if arch == "zimage" else 192), name.replace(".", "_")
    a, b = torch.randn(rank, 64), torch.randn(rows, rank) * 0.1
    w1, w2a, w2b, w2 = (
        torch.randn(4, 4),
        torch.randn(rows // 4, 2) * 0.1,
        torch.randn(2, 16),
        torch.randn(rows // 4, 16) * 0.1,
    )
    return {
        "ai-toolkit lora": {f"diffusion_model.{name}.lora_A.weight": a, f"diffusion_model.{name}.lora_B.weight": b, "": b @ a},
        "ai-toolkit lokr": {
            f"diffusion_model.{name}.lokr_w1": w1, f"diffusion_model.{name}.lokr_w2": w2,
            f"diffusion_model.{name}.alpha": torch.tensor(9999999999.0), "": torch.kron(w1, w2),
        },
        "kohya": {
            f"lora_unet_{flat}.lora_down.weight": a, f"lora_unet_{flat}.lora_up.weight": b,
            f"lora_unet_{flat}.alpha": torch.tensor(1.5), "": b @ a * 0.5,
        },
        "lycoris lokr": {
            f"lycoris_{flat}.lokr_w1": w1, f"lycoris_{flat}.lokr_w2_a": w2a, f"lycoris_{flat}.lokr_w2_b": w2b,
            f"lycoris_{flat}.alpha": torch.tensor(1.0), "": torch.kron(w1, w2a @ w2b) * 0.5,
        },
        "lycoris dora": {
            f"lycoris_{flat}.lora_down.weight": a, f"lycoris_{flat}.lora_up.weight": b,
            f"lycoris_{flat}.alpha": torch.tensor(3.0), f"lycoris_{flat}.dora_scale": torch.rand(rows, 1) + 0.5, "": b @ a,
        },
        "bare diffusers": {f"{name}.lora.down.weight": a, f"{name}.lora.up.weight": b, "": b @ a},
    }  # fmt: skip


@pytest.mark.parametrize("layout", list(foreign("zimage")))
def test_other_tools_files_mean_what_they_mean_there(arch, layout, load_tiny, tmp_path):
    torch.manual_seed(0)
    tensors = foreign(arch)[layout]
    expected = tensors.pop("")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "foreign.safetensors")
    model = load_tiny(arch)
    layers = ["layers.0.attention.to_q"] if arch == "zimage" else [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"]
    weights = torch.cat([model.denoiser.get_submodule(name).weight.detach().clone() for name in layers])
    if layout == "lycoris dora":
        changed = weights + expected
        expected = (
            tensors[next(k for k in tensors if k.endswith("dora_scale"))] * changed / changed.norm(dim=1, keepdim=True)
            - weights
        )
    trained = train_all(model, NetworkConfig(type="full"))
    result = warm_start(model, trained, tmp_path / "foreign.safetensors")
    assert result.layers == len(layers)
    now = torch.cat([model.denoiser.get_submodule(name).weight.detach() for name in layers])
    assert torch.allclose(now - weights, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k.replace("layers.", "blocks."): v for k, v in t.items()},
            "32 keys|16 of 16 layers are not in ZImage",
        ),
        (
            lambda t: {**t, "transformer.layers.0.attention.to_q.lora_C.weight": torch.ones(1)},
            "1 keys belong to no known kind",
        ),
        (lambda t: {k: v for k, v in t.items() if "to_q.lora_A" not in k}, "no complete set of any kind"),
        (
            lambda t: {k: v[:, :3].contiguous() if "to_q.lora_A" in k else v for k, v in t.items()},
            r"multiply to \(64, 3\)",
        ),
        (
            lambda t: {k: v * 0 if "lora_B" in k else v for k, v in t.items()},
            "has no effect: the change it makes is zero",
        ),
        (lambda t: {k: v * float("nan") for k, v in t.items()}, "is not finite"),
        (lambda t: {}, "holds no adapter"),
    ],
    ids=["layers of another model", "unknown keys", "half a pair", "shape", "zero", "nan", "empty"],
)
def test_files_that_would_do_nothing_or_something_else_are_refused(change, message, earlier, load_tiny, tmp_path):
    tensors = change(load_file(earlier("zimage")[2] / "adapter.safetensors"))
    save_file(tensors, tmp_path / "broken.safetensors")
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=4), seed=0)
    with pytest.raises(ValueError, match=message):
        warm_start(model, adapter, tmp_path / "broken.safetensors")


def test_layers_that_are_not_trained_now_are_not_dropped_in_silence(earlier, load_tiny):
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(only_if_contains=("attention",)), seed=0)
    with pytest.raises(ValueError, match="8 are not trained by this network"):
        warm_start(model, adapter, earlier("zimage")[2] / "adapter.safetensors")


def test_frozen_layers_keep_the_earlier_change_and_stay_out_of_the_optimizer(earlier, load_tiny):
    changes, _, folder = earlier("zimage")
    model = load_tiny("zimage")
    rules = ({"match": "*.feed_forward.*", "freeze": True}, {"match": "*.to_q", "lr": 1e-5})
    network = NetworkConfig(linear=4, init_from="/earlier.safetensors", modules=rules)
    adapter = add_adapter(model, network, seed=0)
    warm_start(model, adapter, folder / "adapter.safetensors")
    adapter.set_enabled(False)
    adapter.set_enabled(True)  # as samples do; peft would have all layers trained from then on
    for name in adapter.modules:
        torch.testing.assert_close(adapter.delta_weight(name), changes[name], atol=SAME, rtol=SAME)
    names = {id(parameter): name for name, parameter in adapter.named_parameters()}
    trained = {names[id(parameter)] for group in adapter.optimizer_groups(1e-4) for parameter in group["params"]}
    assert trained == {name for name in names.values() if "feed_forward" not in name}
    assert {name for name, parameter in adapter.named_parameters() if parameter.requires_grad} == trained


def test_a_header_with_alpha_decides_the_scale(earlier, load_tiny, tmp_path):
    changes, _, folder = earlier("zimage")
    config = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})
    save_file(
        load_file(folder / "adapter.safetensors"),
        tmp_path / "half.safetensors",
        metadata={"lora_adapter_metadata": config},
    )
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=4), seed=0)
    warm_start(model, adapter, tmp_path / "half.safetensors")
    assert all(torch.allclose(adapter.delta_weight(m), delta / 2, atol=1e-6) for m, delta in changes.items())


# ---------------------------------------------------------------------- in a job
def test_a_job_begins_with_it_once_and_resumes_without_it(earlier, tiny_model_folder, tmp_path):
    file = tmp_path / "first.safetensors"
    file.write_bytes((earlier("zimage")[2] / "adapter.safetensors").read_bytes())
    data = make_pictures(tmp_path / "data", [(64, 64)])
    job = Job(
        tmp_path / "whole", tiny_model_folder("zimage"), data, tmp_path / "cache",
        network={"type": "lora", "linear": 5, "init_from": str(file)}, train={"steps": 3},
    )  # fmt: skip
    plain = job.copy("plain").change(network={"init_from": None})
    assert job.run() == 0
    assert plain.run() == 0
    assert job.metrics()[0]["loss"] != plain.metrics()[0]["loss"]
    broken = job.copy("broken")
    assert broken.run(stop_after=2) == 85
    file.unlink()
    assert broken.run() == 0, broken.word()
    assert broken.newest()["adapter.safetensors"] == job.newest()["adapter.safetensors"]
    missing = job.copy("missing")
    assert missing.run() == 65
    assert missing.word().message == f"config.network.init_from: {file} is not a file"
