"""Quantised base models: the formats against their formulas, adapters of every type on top, and whole runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lora_api.archs import Arch
from lora_api.config import ModelConfig, TrainerConfig
from lora_api.memory import estimate_of
from lora_api.memory.estimate import shapes_for
from lora_api.memory.trained import layers_in_blocks
from lora_api.network import NetworkConfig
from lora_api.training import Precision
from lora_trainer.memory.blocks import repeated_blocks
from lora_trainer.memory.placing import place_base
from lora_trainer.memory.quantised import QuantisedLinear, dequantised, put_weight, quantise_layer, quantised
from lora_trainer.networks import add_adapter, merge_assistant
from tests.trainer.jobs import Job, answer, disturb, make_pictures, noisy_pictures

CPU = torch.device("cpu")
FORMATS = ("int8", "fp8", "nf4")
ERRORS = {"int8": 0.01, "fp8": 0.035, "nf4": 0.11}
"""Relative error of normally distributed weights: half a step of 4 sigma / 127, 2^-4 / sqrt(3) or so, and QLoRA's figure."""


def weights(m=96, n=256, dtype=torch.float32):
    return (torch.randn(m, n, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def layer_of(weight, kind, bias=True):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype).requires_grad_(
        requires_grad=False
    )
    layer.weight.data.copy_(weight)
    quantise_layer(layer, kind, CPU)
    return layer


def relative(found, expected) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


# ---------------------------------------------------------------------- formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_come_back_within_the_error_of_the_format(kind, dtype):
    weight = weights(dtype=dtype)
    error = relative(layer_of(weight, kind).weight, weight)
    assert ERRORS[kind] / 4 < error < ERRORS[kind]


def test_int8_is_the_nearest_multiple_of_a_scale_for_each_output():
    weight = weights()
    codes, scale = quantised(weight, "int8")
    for row, code, step in zip(weight, codes, scale, strict=True):
        assert step.item() == pytest.approx(row.abs().max().item() / 127, rel=1e-6)
        assert code.abs().max() == 127
        assert (row - code.float() * step).abs().max() <= step / 2 * 1.001


def test_fp8_is_the_nearest_e4m3_number_times_a_scale():
    weight = weights(8, 64)
    codes, scale = quantised(weight, "fp8")
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    nearest = (weight / scale)[..., None].sub(numbers).abs().min(-1).values
    found = (weight / scale - codes.view(torch.float8_e4m3fn).float()).abs()
    torch.testing.assert_close(found, nearest, atol=1e-5, rtol=1e-5)


def test_nf4_is_the_nearest_of_sixteen_levels_times_a_scale_for_sixty_four_weights():
    from bitsandbytes.functional import get_4bit_type

    weight = weights(8, 64)
    codes, scale = quantised(weight, "nf4")
    assert codes.numel() == weight.numel() // 2
    torch.testing.assert_close(scale.view(-1, 1), weight.abs().amax(dim=1, keepdim=True))
    levels = get_4bit_type("nf4", device="cpu")
    nearest = (weight / scale.view(-1, 1))[..., None].sub(levels).abs().min(-1).values
    back = dequantised(codes, scale, "nf4", tuple(weight.shape), torch.float32)
    torch.testing.assert_close((weight - back).abs() / scale.view(-1, 1), nearest, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_zeros_and_odd_sizes_are_kept(kind):
    weight = weights(5, 33)
    weight[2] = 0
    layer = layer_of(weight, kind)
    assert layer.weight.shape == weight.shape
    if kind != "nf4":
        assert not layer.weight[2].any()
    assert layer(torch.ones(2, 33)).isfinite().all()


@pytest.mark.parametrize("kind", FORMATS)
def test_output_and_gradient_are_those_of_the_weight_that_the_codes_stand_for(kind):
    layer = layer_of(weights(), kind)
    x = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    nn.functional.linear(twin, layer.weight, layer.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("kind", FORMATS)
def test_autocast_and_casts_of_the_module_leave_codes_alone(kind):
    layer = layer_of(weights(dtype=torch.bfloat16), kind)
    codes = layer.codes.clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 256)).dtype == torch.bfloat16
    layer.to(torch.float32)
    assert torch.equal(layer.codes, codes)


@pytest.mark.parametrize("kind", FORMATS)
def test_only_codes_are_kept_for_the_backward_pass(kind):
    layer, kept = layer_of(weights(), kind), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.ones(2, 256, requires_grad=True))
    assert {t.untyped_storage().data_ptr() for t in kept} == {
        layer.codes.untyped_storage().data_ptr(),
        layer.scale.untyped_storage().data_ptr(),
    }


def test_a_weight_that_is_not_finite_is_refused():
    weight = weights()
    weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        layer_of(weight, "int8")


# ---------------------------------------------------------------------- families and adapters
def placed(load_tiny, arch, kind, dtype=torch.float32, te=None):
    model = load_tiny(arch, dtype)
    place_base(model, ModelConfig(arch=arch, name_or_path="/m", quantize=kind, quantize_te=te), CPU)
    return model


@pytest.mark.parametrize("arch", [arch for arch in Arch if arch != "flux2_klein_9b"])
def test_the_linear_layers_of_the_blocks_are_quantised_and_counted_to_the_byte(arch, load_tiny, tiny_model_folder):
    for kind in FORMATS:
        model = placed(load_tiny, arch, kind)
        model.free_encoders()
        described = TrainerConfig.model_validate(
            {
                "model": {"arch": arch, "name_or_path": str(tiny_model_folder(arch)), "quantize": kind},
                "datasets": [{"folder_path": "/d"}],
            }
        )
        shapes = shapes_for(described)
        found = [n for n, m in model.denoiser.named_modules() if isinstance(m, QuantisedLinear)]
        expected = [n for part in shapes.denoisers.values() for n, _ in layers_in_blocks(arch, part)]
        assert len(found) == len(expected) > 0
        modules = [model.denoiser, model.pipe.vae]
        tensors = [
            t for m in modules for t in (*m.parameters(), *(b for n, b in m.named_buffers() if n in m.state_dict()))
        ]
        held = sum(t.numel() * t.element_size() for t in tensors)
        estimate = estimate_of(described, shapes, precision=Precision.FP32)
        assert estimate.weights == held
        plain = estimate_of(
            described.model_copy(update={"model": described.model.model_copy(update={"quantize": None})}),
            shapes, precision=Precision.FP32,
        )  # fmt: skip
        assert held < plain.weights


def test_every_family_has_blocks_and_none_lies_in_another(load_tiny):
    for arch in Arch:
        blocks = repeated_blocks(load_tiny(arch).denoiser) if arch != "flux2_klein_9b" else [nn.Linear(1, 1)]
        inner = {child for block in blocks for child in block.modules() if child is not block}
        assert blocks
        assert not inner & set(blocks)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_model_answers_nearly_as_the_plain_one(kind, load_tiny, arch):
    plain, found = answer(load_tiny(arch)), answer(placed(load_tiny, arch, kind))
    assert 0 < relative(found, plain) < 2 * ERRORS[kind]


@pytest.mark.parametrize("network", ["lora", "dora", "lokr", "loha"])
@pytest.mark.parametrize("kind", FORMATS)
def test_adapters_of_every_type_learn_what_they_would_on_the_plain_model(kind, network, load_tiny):
    gradients = {}
    for name in (None, kind):
        model = load_tiny("zimage") if name is None else placed(load_tiny, "zimage", kind)
        adapter = add_adapter(model, NetworkConfig(type=network, linear=4), seed=0)
        disturb(adapter, std=0.05)
        v = model.velocity(*noisy_pictures(model))
        v.pow(2).mean().backward()
        assert all(p.dtype == torch.float32 for p in adapter.parameters())
        gradients[name] = torch.cat([p.grad.flatten() for p in adapter.parameters()])
    cosine = torch.nn.functional.cosine_similarity(gradients[kind], gradients[None], dim=0)
    assert cosine > {"int8": 0.999, "fp8": 0.995, "nf4": 0.93}[kind]
    assert gradients[kind].ne(gradients[None]).any()


@pytest.mark.parametrize("network", ["lora", "lokr", "loha"])
def test_delta_weight_does_not_depend_on_the_base_model_s_format(network, load_tiny):
    deltas = []
    for kind in (None, "nf4"):
        model = load_tiny("zimage") if kind is None else placed(load_tiny, "zimage", kind)
        adapter = add_adapter(model, NetworkConfig(type=network, linear=4), seed=0)
        disturb(adapter)
        deltas.append([adapter.delta_weight(name) for name in adapter.modules])
    for plain, found in zip(*deltas, strict=True):
        assert torch.equal(plain, found)


def test_text_encoders_are_quantised_when_asked_and_known_by_another_name(load_tiny):
    plain, small = load_tiny("zimage"), placed(load_tiny, "zimage", None, te="int8")
    assert plain.text_identity != small.text_identity
    error = relative(small.encode_text("a red cube")["embeds"], plain.encode_text("a red cube")["embeds"])
    assert 0 < error < 0.05
    assert any(isinstance(m, QuantisedLinear) for m in small.text_encoder("text_encoder").modules())
    assert not any(isinstance(m, QuantisedLinear) for m in small.denoiser.modules())


def test_a_training_adapter_is_merged_before_and_taken_out_to_the_bit(load_tiny, tmp_path):
    from safetensors.torch import save_file

    donor = load_tiny("zimage")
    trained = add_adapter(donor, NetworkConfig(linear=2), seed=0)
    disturb(trained)
    file = tmp_path / "assistant.safetensors"
    save_file({f"transformer.{key}": t for key, t in trained.state_dict().items()}, file)
    config = ModelConfig(arch="zimage", name_or_path="/m", quantize="int8")
    merged, plain = load_tiny("zimage"), load_tiny("zimage")
    merged.assistant = merge_assistant(merged.pipe, file)
    place_base(merged, config, CPU)
    place_base(plain, config, CPU)
    before = answer(merged)
    assert relative(before, answer(plain)) > 0.01
    with merged.plain_weights():
        assert torch.equal(answer(merged), answer(plain))
    assert torch.equal(answer(merged), before)


def test_a_plain_layer_takes_a_weight_as_it_is():
    layer, weight = nn.Linear(4, 3), torch.ones(3, 4)
    put_weight(layer, weight)
    assert torch.equal(layer.weight, weight)


# ---------------------------------------------------------------------- whole runs
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_run_resumes_to_the_bit_and_its_adapter_loads_in_diffusers(kind, tmp_path, tiny_model_folder):
    from diffusers import ZImagePipeline

    from lora_trainer.export import load_into_pipeline

    data = make_pictures(tmp_path / "data")
    job = Job(tmp_path / "whole", tiny_model_folder("zimage"), data, tmp_path / "cache").change(
        model={"quantize": kind},
        train={"steps": 6},
        sample={"prompts": ["a cube"], "width": 64, "height": 64, "sample_steps": 1},
    )
    twin = job.copy("broken")
    assert job.run() == 0
    assert twin.run(stop_after=2) == 85
    assert twin.run() == 0
    assert job.newest()["adapter.safetensors"] == twin.newest()["adapter.safetensors"]
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(job.store.get("final/adapter.safetensors") or b"")
    assert load_into_pipeline(ZImagePipeline.from_pretrained(tiny_model_folder("zimage")), file) > 0
    assert copy.copy(job.store.get("final/sample-00.png"))
