"""Every adapter type on every family: how it starts, what trains, how strong it is; and several types in one model."""

from __future__ import annotations

import pytest
import torch

from lora_api.network import NetworkConfig
from lora_trainer.networks import add_adapter, plan_layers
from tests.trainer.jobs import answer, disturb, noisy_pictures

LORA_AND_LOKR = {"modules": ({"match": "*.to_[qk]", "type": "lokr"}, {"match": "*.to_v", "type": "loha", "linear": 3})}
TYPES = {
    "lora": {"type": "lora", "linear": 4, "linear_alpha": 6},
    "dora": {"type": "dora", "linear": 4, "linear_alpha": 6},
    "loha": {"type": "loha", "linear": 4, "linear_alpha": 6},
    "lokr": {"type": "lokr"},
    "lokr-low": {"type": "lokr", "lokr_full_rank": False, "linear": 2, "linear_alpha": 5},
    "mixed": {"type": "dora", "linear": 4, "linear_alpha": 6, **LORA_AND_LOKR},
}


@pytest.fixture(params=TYPES)
def network(request) -> NetworkConfig:
    """Each type in turn."""
    return NetworkConfig(**TYPES[request.param])


def test_it_starts_as_the_base_model_and_every_tensor_gets_a_gradient(arch, network, load_tiny):
    model = load_tiny(arch)
    base = answer(model)
    adapter = add_adapter(model, network, seed=0)
    fresh = answer(model)
    rounding = 0 if "dora" not in adapter.kinds else 1e-5  # dora divides by a norm and multiplies by it again
    assert (fresh - base).abs().max() <= rounding
    assert all(adapter.delta_weight(module).abs().max() <= rounding for module in adapter.modules)
    disturb(adapter, std=0.05)  # factors behind a zero have no gradient at the very first step
    x, sigma, conditioning = noisy_pictures(model)
    (model.velocity(x, sigma, conditioning) - torch.ones_like(x)).pow(2).mean().backward()
    silent = [name for name, p in adapter.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert silent == []


def test_the_output_is_that_of_the_base_model_with_the_change_added_to_its_weights(arch, network, load_tiny):
    model = load_tiny(arch)
    adapter = add_adapter(model, network, seed=0)
    disturb(adapter, std=0.2)
    with_adapter = answer(model)
    adapter.set_enabled(False)
    assert not torch.allclose(answer(model), with_adapter, atol=1e-3)
    merged = load_tiny(arch)
    for module in adapter.modules:
        merged.denoiser.get_submodule(module).weight.data += adapter.delta_weight(module)
    assert torch.allclose(answer(merged), with_adapter, atol=5e-5)


@pytest.mark.parametrize("kind", ["dora", "loha"])
def test_alpha_scales_what_is_added_exactly(kind, load_tiny):
    products = []
    for alpha in (4, 10):
        adapter = add_adapter(load_tiny("zimage"), NetworkConfig(type=kind, linear=4, linear_alpha=alpha), seed=0)
        disturb(adapter)
        factors = adapter.factors("layers.0.attention.to_q")
        assert factors.scale == alpha / 4
        products.append(factors.product())
    assert torch.allclose(products[1], products[0] * 2.5, rtol=1e-6)


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
def test_a_bf16_base_trains_under_autocast(kind, load_tiny):
    model = load_tiny("zimage", torch.bfloat16)
    adapter = add_adapter(model, NetworkConfig(type=kind, linear=4), seed=0)
    x, sigma, conditioning = noisy_pictures(model)
    with torch.autocast("cpu", torch.bfloat16):
        model.velocity(x, sigma, conditioning).pow(2).mean().backward()
    assert {p.grad.dtype for p in adapter.parameters()} == {torch.float32}
    assert all(torch.isfinite(p.grad).all() for p in adapter.parameters())


# ---------------------------------------------------------------------- rules for some layers
def plan(model, **network):
    network = NetworkConfig(**{"linear": 4, **network})
    return {layer.name: layer for layer in plan_layers(model.parts(), network)}


def test_the_first_rule_that_matches_a_layer_decides(load_tiny):
    model = load_tiny("zimage")
    layers = plan(
        model,
        linear_alpha=2,
        modules=(
            {"match": "transformer.layers.0.attention.*", "type": "loha", "linear": 2},
            {"match": "layers.*.attention.to_q", "linear_alpha": 8, "lr": 1e-3},
            {"match": "*.feed_forward.*", "freeze": True},
        ),
    )
    assert len(layers) == 16 - 6
    first, second = layers["layers.0.attention.to_q"], layers["layers.1.attention.to_q"]
    assert (first.kind, first.rank, first.alpha, first.lr) == ("loha", 2, 2.0, None)
    assert (second.kind, second.rank, second.alpha, second.lr) == ("lora", 4, 8.0, 1e-3)
    rest = layers["layers.1.attention.to_v"]
    assert (rest.kind, rest.rank, rest.alpha, rest.lr) == ("lora", 4, 2.0, None)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            ({"match": "*.to_z", "type": "lokr"},),
            r"modules\[0\]\.match: '\*\.to_z' matches no layer; layers are layers\.0\.",
        ),
        (
            ({"match": "layers.*", "linear": 2}, {"match": "*.to_q", "linear": 3}),
            r"modules\[1\]\.match: '\*\.to_q' is never reached",
        ),
        (({"match": "*", "freeze": True},), "freeze all layers"),
    ],
)
def test_a_rule_without_effect_is_refused(modules, message, load_tiny):
    with pytest.raises(ValueError, match=message):
        plan(load_tiny("zimage"), modules=modules)


def test_frozen_layers_hold_no_adapter_and_rates_become_groups_in_a_fixed_order(load_tiny):
    model = load_tiny("zimage")
    rules = ({"match": "layers.1.*", "freeze": True}, {"match": "*.to_q", "lr": 4e-4}, {"match": "*.to_k", "lr": 5e-5})
    adapter = add_adapter(model, NetworkConfig(linear=2, modules=rules), seed=0)
    assert not any(name.startswith("layers.1.") for name in adapter.modules)
    groups = adapter.optimizer_groups(1e-4)
    assert [group["lr_scale"] for group in groups] == [1.0, 0.5, 4.0]
    names = {id(p): name for name, p in adapter.named_parameters()}
    assert [[names[id(p)] for p in group["params"]] for group in groups[1:]] == [
        [f"layers.0.attention.to_k.lora_{x}.weight" for x in "AB"],
        [f"layers.0.attention.to_q.lora_{x}.weight" for x in "AB"],
    ]
    assert sum(len(group["params"]) for group in groups) == len(adapter.parameters())


def test_a_model_of_several_types_holds_each_in_its_layers(load_tiny):
    adapter = add_adapter(load_tiny("zimage"), NetworkConfig(**TYPES["mixed"]), seed=0)
    assert adapter.kinds == ["dora", "loha", "lokr"]
    keys = adapter.state_dict()
    assert {"layers.0.attention.to_q.lokr_w1", "layers.0.attention.to_v.hada_w1_a"} <= keys.keys()
    assert keys["layers.0.attention.to_v.hada_w1_b"].shape[0] == 3
    assert "layers.0.feed_forward.w1.lora_magnitude_vector" in keys
