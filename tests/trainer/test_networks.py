"""Adapters: where they sit, how they start, how strong they are, and that their state survives to the bit."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lora_api.network import NetworkConfig
from lora_trainer.families.parts import Part
from lora_trainer.networks import Adapter, Targets, add_adapter, build_peft_configs, plan_layers, resolve_targets
from lora_trainer.networks.adapter import inject
from tests.trainer.jobs import answer, disturb

LORA = NetworkConfig(linear=4)
LOKR = NetworkConfig(type="lokr")
LOKR_LOW = NetworkConfig(type="lokr", lokr_full_rank=False, linear=2, linear_alpha=4)


@pytest.mark.parametrize("network", [LORA, LOKR, LOKR_LOW], ids=["lora", "lokr", "lokr-low"])
def test_a_fresh_adapter_does_not_change_the_output(arch, network, load_tiny):
    model = load_tiny(arch)
    base = answer(model)
    adapter = add_adapter(model, network, seed=0)
    assert torch.equal(answer(model), base)
    disturb(adapter)
    assert not torch.allclose(answer(model), base, atol=1e-3)
    adapter.set_enabled(False)
    assert torch.equal(answer(model), base)
    adapter.set_enabled(True)
    assert not torch.allclose(answer(model), base, atol=1e-3)
    assert all(p.requires_grad for p in adapter.parameters())


def test_every_default_layer_gets_an_adapter_and_nothing_else_trains(arch, load_tiny):
    model = load_tiny(arch)
    defaults = model.default_targets()
    adapter = add_adapter(model, LORA, seed=0)
    assert adapter.modules == sorted(defaults)
    assert adapter.module_count == 16
    trained = [p for p in model.denoiser.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in adapter.parameters()}


def test_start_values_depend_on_the_seed_alone(load_tiny):
    def start(seed: int, global_seed: int, dtype: torch.dtype = torch.float32):
        model = load_tiny("zimage", dtype)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        adapter = add_adapter(model, LORA, seed=seed)
        assert torch.equal(torch.get_rng_state(), before), "the global generator must be left as it was"
        return adapter.state_dict()

    first, again, bf16, other = start(3, 0), start(3, 1), start(3, 2, torch.bfloat16), start(4, 0)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(torch.equal(first[key], bf16[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_parameters_come_in_the_order_of_their_names(load_tiny):
    adapter = add_adapter(load_tiny("zimage"), LORA, seed=0)
    names = [name for name, _ in adapter.named_parameters()]
    assert names == sorted(names) == list(adapter.state_dict())
    assert names[0] == "layers.0.adaLN_modulation.0.lora_A.weight"
    assert all(a is b for a, (_, b) in zip(adapter.parameters(), adapter.named_parameters(), strict=True))


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (4, 1.0), (8, 2.0), (1, 0.25)])
def test_the_change_is_exactly_alpha_over_rank_times_b_a(alpha, scale, load_tiny):
    adapter = add_adapter(load_tiny("zimage"), NetworkConfig(linear=4, linear_alpha=alpha), seed=0)
    disturb(adapter)
    state = adapter.state_dict()
    for module in adapter.modules:
        expected = scale * (state[f"{module}.lora_B.weight"] @ state[f"{module}.lora_A.weight"])
        assert torch.equal(adapter.delta_weight(module), expected)


def test_alpha_changes_the_output(arch, load_tiny):
    outputs = []
    for alpha in (4, 8):
        model = load_tiny(arch)
        disturb(add_adapter(model, NetworkConfig(linear=4, linear_alpha=alpha), seed=0))
        outputs.append(answer(model))
    assert not torch.allclose(*outputs, atol=1e-3)


def test_the_output_is_that_of_a_base_model_with_the_change_added_to_its_weights(arch, load_tiny):
    for network in (NetworkConfig(linear=4, linear_alpha=6), LOKR_LOW):
        model = load_tiny(arch)
        adapter = add_adapter(model, network, seed=0)
        disturb(adapter)
        with_adapter = answer(model)
        merged = load_tiny(arch)
        for module in adapter.modules:
            merged.denoiser.get_submodule(module).weight.data += adapter.delta_weight(module)
        assert torch.allclose(answer(merged), with_adapter, atol=2e-5)


@pytest.mark.parametrize("factor", [-1, 4])
def test_full_rank_lokr_is_the_kronecker_product_with_scale_one(factor, load_tiny):
    network = NetworkConfig(type="lokr", lokr_factor=factor, linear=7, linear_alpha=3)
    adapter = add_adapter(load_tiny("zimage"), network, seed=0)
    disturb(adapter)
    state = adapter.state_dict()
    for module in adapter.modules:
        w1, w2 = state[f"{module}.lokr_w1"], state[f"{module}.lokr_w2"]
        assert torch.equal(adapter.delta_weight(module), torch.kron(w1, w2))
    assert state["layers.0.attention.to_q.lokr_w1"].shape == ((4, 4) if factor == 4 else (8, 8))


def test_low_rank_lokr_is_scaled_by_alpha_over_rank(load_tiny):
    adapter = add_adapter(load_tiny("zimage"), LOKR_LOW, seed=0)
    disturb(adapter)
    state = adapter.state_dict()
    module = "layers.0.attention.to_q"
    w2 = state[f"{module}.lokr_w2_a"] @ state[f"{module}.lokr_w2_b"]
    assert torch.equal(adapter.delta_weight(module), torch.kron(state[f"{module}.lokr_w1"], w2) * 2)


def test_a_bf16_base_keeps_an_fp32_adapter_that_trains_under_autocast(arch, load_tiny):
    model = load_tiny(arch, torch.bfloat16)
    adapter = add_adapter(model, LORA, seed=0)
    assert {p.dtype for p in adapter.parameters()} == {torch.float32}
    channels, side = (16, 8) if arch == "zimage" else (64, 4)
    x = torch.randn(1, channels, side, side)
    with torch.autocast("cpu", torch.bfloat16):
        v = model.velocity(x, torch.tensor([0.5]), model.collate([model.encode_text("a red cube")]))
    assert v.dtype == torch.float32
    v.pow(2).mean().backward()
    assert {p.grad.dtype for p in adapter.parameters()} == {torch.float32}
    assert any(p.grad.abs().max() > 0 for p in adapter.parameters())


# ---------------------------------------------------------------------- state
@pytest.mark.parametrize("network", [LORA, LOKR, LOKR_LOW], ids=["lora", "lokr", "lokr-low"])
def test_state_is_taken_over_to_the_bit(network, load_tiny):
    model = load_tiny("zimage")
    adapter = add_adapter(model, network, seed=0)
    disturb(adapter)
    state, output = adapter.state_dict(), answer(model)
    disturb(adapter, seed=2)
    assert not torch.equal(state[next(iter(state))], adapter.state_dict()[next(iter(state))]), "the state is a copy"
    fresh = load_tiny("zimage")
    add_adapter(fresh, network, seed=9).load_state_dict(state)
    assert torch.equal(answer(fresh), output)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(load_tiny):
    adapter = add_adapter(load_tiny("zimage"), LORA, seed=0)
    state = adapter.state_dict()
    key = "layers.0.attention.to_q.lora_A.weight"
    for broken, message in (
        ({k: v for k, v in state.items() if k != key}, "1 keys are missing"),
        ({**state, "more": torch.zeros(1)}, "1 are unexpected"),
        ({**state, key: state[key][:2]}, r"is \(2, 64\) torch.float32, expected \(4, 64\)"),
        ({**state, key: state[key].bfloat16()}, "torch.bfloat16, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            adapter.load_state_dict({name: tensor + 1 for name, tensor in broken.items()})
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter.state_dict().items())


def test_a_second_adapter_is_refused(load_tiny):
    model = load_tiny("zimage")
    add_adapter(model, LORA, seed=0)
    with pytest.raises(ValueError, match="has an adapter already"):
        add_adapter(model, LORA, seed=0)


# ---------------------------------------------------------------------- dropout
def test_dropout_follows_the_global_generator_and_stays_out_of_samples(load_tiny):
    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=4, dropout=0.5), seed=0)
    disturb(adapter)
    torch.manual_seed(0)
    first = answer(model)
    second = answer(model)
    torch.manual_seed(0)
    assert torch.equal(answer(model), first)
    assert not torch.equal(second, first)
    condition = model.encode_text("a red cube")
    options = {"width": 32, "height": 32, "steps": 2, "guidance_scale": 0.0, "seed": 0}
    assert model.sample(condition, None, **options) == model.sample(condition, None, **options)
    assert not torch.equal(answer(model), answer(model)), "sampling switched dropout off for good"
    adapter.train(False)
    assert torch.equal(answer(model), answer(model))


# ---------------------------------------------------------------------- choosing layers
def test_layer_filters_keep_and_drop_by_part_of_the_name(load_tiny):
    network = NetworkConfig(only_if_contains=("attention", "feed_forward"), ignore_if_contains=("layers.1", "w2"))
    adapter = add_adapter(load_tiny("zimage"), network, seed=0)
    assert adapter.modules == [
        *(f"layers.0.attention.{name}" for name in ("to_k", "to_out.0", "to_q", "to_v")),
        *(f"layers.0.feed_forward.{name}" for name in ("w1", "w3")),
    ]


def test_layer_filters_take_names_with_the_prefix_of_adapter_files(load_tiny):
    network = NetworkConfig(only_if_contains=("transformer.layers.1.",))
    assert add_adapter(load_tiny("zimage"), network, seed=0).module_count == 8


@pytest.mark.parametrize("field", ["only_if_contains", "ignore_if_contains"])
def test_a_filter_that_matches_nothing_is_refused_with_candidates(field, load_tiny):
    model = load_tiny("zimage")
    with pytest.raises(
        ValueError, match=rf"network\.{field}: 'atention' is part of no layer name.*layers\.0\.attention"
    ):
        add_adapter(model, NetworkConfig(**{field: ("atention",)}), seed=0)
    add_adapter(model, LORA, seed=0)  # the refusal left the model untouched


def test_filters_that_leave_no_layer_are_refused(load_tiny):
    network = NetworkConfig(only_if_contains=("attention",), ignore_if_contains=("layers",))
    with pytest.raises(ValueError, match="leave no layer to train"):
        add_adapter(load_tiny("zimage"), network, seed=0)


def test_a_convolution_rank_without_convolutions_is_noted(load_tiny, caplog):
    with caplog.at_level(logging.INFO):
        adapter = add_adapter(load_tiny("zimage"), NetworkConfig(conv=8, conv_alpha=8), seed=0)
    assert "network.conv: 8 plays no part" in caplog.text
    assert adapter.module_count == 16


class WithConvolutions(nn.Module):
    """A denoiser that has both kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr"])
def test_convolutions_have_their_own_rank_and_alpha_where_a_family_has_them(kind):
    denoiser = WithConvolutions()
    network = NetworkConfig(type=kind, lokr_full_rank=False, linear=2, linear_alpha=2, conv=1, conv_alpha=3)
    parts = [Part("transformer", denoiser, ("proj", "conv"))]
    assert resolve_targets(parts, NetworkConfig(type=kind)) == Targets(("proj",))
    assert resolve_targets(parts, network) == Targets(("proj",), ("conv",))
    x = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    weight = denoiser.conv.weight.detach().clone()
    layers = plan_layers(parts, network)
    inject(denoiser, build_peft_configs(layers, network))
    adapter = Adapter(parts, layers, network)
    adapter.reset(0)
    assert (adapter.factors("proj").scale, adapter.factors("conv").scale) == (1.0, 3.0)
    assert adapter.factors("conv").rank == 1
    disturb(adapter)
    merged = nn.functional.conv2d(x, weight + adapter.delta_weight("conv"), denoiser.conv.bias, padding=1)
    assert torch.allclose(denoiser.conv(x), merged, atol=1e-5)


def test_default_targets_that_are_no_layers_are_refused():
    with pytest.raises(ValueError, match=r"\['mid'\]: not linear or convolution layers of WithConvolutions"):
        resolve_targets([Part("transformer", WithConvolutions(), ("proj", "mid"))], LORA)
