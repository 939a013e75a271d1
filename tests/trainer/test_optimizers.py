"""Every optimizer: against its formula, its groups, and its state through files and back, to the bit."""

from __future__ import annotations

import json
import math
from typing import get_args

import pytest
import torch
from safetensors.torch import load, save

from lora_api.optimization import STATE_BYTES, Optimizer
from lora_api.training import TrainConfig
from lora_trainer.errors import ConfigurationError
from lora_trainer.optimizers import OptimizerState, build, build_optimizer, load_state, state_of

NAMES = get_args(Optimizer)
EVERY = pytest.mark.parametrize("name", NAMES)
SHAPES = ((70, 64), (8,), (6, 5), (3, 4, 2, 2))  # the first is large enough for 8-bit moments
LATE = 2  # the parameter whose first gradient comes at the third update, as for an expert that was not asked


def config(name, **train):
    rate = {"prodigy": 1.0}.get(name, 1e-2)
    return TrainConfig(optimizer=name, **({"lr": rate} | train))


def fresh(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(parameters):
    return [
        {"params": parameters[:1], "lr_scale": 1.0},
        {"params": parameters[1:3], "lr_scale": 0.25},
        {"params": parameters[3:], "lr_scale": 3.0},
    ]


def train(optimizer, parameters, steps, lr):
    """Updates with gradients that point at 0, with noise; a rate that rises, and a pass that was skipped."""
    for step in steps:
        for number, parameter in enumerate(parameters):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(97 * step + number))
            parameter.grad = None if number == LATE and step < 2 else parameter.detach() + 0.1 * noise
        if step != 3:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 4) * group["lr_scale"]
            optimizer.step()
        optimizer.zero_grad()


def through_files(optimizer):
    state = state_of(optimizer)
    return OptimizerState(load(save(state.tensors)), **json.loads(json.dumps(state.facts())))


# ---------------------------------------------------------------------- state
@EVERY
def test_a_state_that_went_through_files_goes_on_to_the_same_bits_from_any_step(name):
    train_config = config(name)
    whole = fresh()
    optimizer = build_optimizer(groups(whole), train_config)
    train(optimizer, whole, range(8), train_config.lr)
    for stop in (1, 2, 3, 5):
        parameters = fresh()
        first = build_optimizer(groups(parameters), train_config)
        train(first, parameters, range(stop), train_config.lr)
        resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        second = build_optimizer(groups(resumed), train_config)
        load_state(second, through_files(first))
        train(second, resumed, range(stop, 8), train_config.lr)
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
        last = [state_of(each) for each in (optimizer, second)]
        assert last[0].facts() == last[1].facts()
        assert all(torch.equal(tensor, last[1].tensors[key]) for key, tensor in last[0].tensors.items())


@EVERY
def test_a_lost_state_would_be_noticed(name):
    train_config = config(name)
    ends = []
    for forgets in (False, True):
        parameters = fresh()
        optimizer = build_optimizer(groups(parameters), train_config)
        train(optimizer, parameters, range(5), train_config.lr)
        if forgets:
            optimizer = build_optimizer(groups(parameters), train_config)
        train(optimizer, parameters, range(5, 8), train_config.lr)
        ends.append(parameters)
    assert not torch.equal(ends[0][0], ends[1][0])


def test_adamw_needs_nothing_but_tensors_so_old_checkpoints_are_read_as_they_are():
    parameters = fresh()
    optimizer = build_optimizer(groups(parameters), config("adamw"))
    train(optimizer, parameters, range(4), 1e-2)
    state = state_of(optimizer)
    assert state.facts() == {}
    assert {name.partition(".")[2] for name in state.tensors} == {"step", "exp_avg", "exp_avg_sq"}
    load_state(build_optimizer(groups(fresh()), config("adamw")), OptimizerState(state.tensors))


def test_a_table_that_all_parameters_share_is_saved_once():
    parameters = [torch.nn.Parameter(torch.randn(70, 64)) for _ in range(3)]
    optimizer = build_optimizer(parameters, config("adamw8bit"))
    train(optimizer, parameters, range(4), 1e-2)
    state = state_of(optimizer)
    assert len([name for name in state.tensors if name.endswith("qmap1")]) == 1
    assert len(state.same_as) == 4


@EVERY
def test_it_keeps_as_many_bytes_for_a_number_as_is_said(name):
    parameters = [torch.nn.Parameter(torch.randn(256, 256))]
    optimizer = build_optimizer(parameters, config(name))
    train(optimizer, parameters, range(2), 1e-2)
    held = sum(
        tensor.nbytes for tensor in state_of(optimizer).tensors.values() if tensor.numel() != 256 or name != "adamw8bit"
    )
    assert held / 256**2 == pytest.approx(STATE_BYTES[name], abs=0.04)


# ---------------------------------------------------------------------- groups
@EVERY
def test_the_step_of_a_group_is_in_proportion_to_its_rate(name):
    start = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    train_config = config(name, weight_decay=0.0)
    optimizer = build_optimizer(
        [{"params": parameters[:1], "lr_scale": 1.0}, {"params": parameters[1:], "lr_scale": 0.1}], train_config
    )
    for parameter in parameters:
        parameter.grad = start.clone()
    for group in optimizer.param_groups:
        group["lr"] = train_config.lr * group["lr_scale"]
    optimizer.step()
    moved = [(parameter.detach() - start).abs().mean().item() for parameter in parameters]
    assert moved[0] > 0
    assert moved[1] / moved[0] == pytest.approx(0.1, rel=1e-2)


@EVERY
def test_weight_decay_shrinks_weights_in_proportion_to_the_rate(name):
    ends = []
    for decay in (0.0, 0.5):
        parameters = [torch.nn.Parameter(torch.full((70, 64), 2.0))]
        train_config = config(name, weight_decay=decay)
        optimizer = build_optimizer(parameters, train_config)
        parameters[0].grad = torch.ones(70, 64)
        optimizer.step()
        ends.append(parameters[0].detach().clone())
    rate = 1e-6 if name == "prodigy" else 1e-2
    assert (ends[0] - ends[1]).mean().item() == pytest.approx(2.0 * 0.5 * rate, rel=0.15)


# ---------------------------------------------------------------------- formulas
def quadratic(name, reference, steps=12, lr=1e-2, **options):
    """The largest difference between an optimizer and a formula over some updates, and how far they came."""
    train_config = config(name, lr=lr, **options)
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer([parameter], train_config)
    x, memory, worst = start.double(), {}, 0.0
    for step in range(steps):
        gradient = torch.randn(7, 5, generator=torch.Generator().manual_seed(step)) + parameter.detach()
        parameter.grad = gradient.clone()
        optimizer.step()
        x = reference(x, gradient.double(), step + 1, memory, train_config)
        worst = max(worst, (parameter.detach() - x).abs().max().item())
    return worst, (x - start).abs().max().item()


def lion(x, g, t, memory, train):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1."""
    m = memory.get("m", torch.zeros_like(x))
    c = 0.9 * m + 0.1 * g
    memory["m"] = 0.99 * m + 0.01 * g
    return x - train.lr * (c.sign() + train.weight_decay * x)


def adafactor(x, g, t, memory, train):
    """Shazeer & Stern 2018, algorithm 4 with a rate of its own, in means instead of sums."""
    beta = 1 - t**-0.8
    square = g**2 + 1e-30
    row = memory["r"] = beta * memory.get("r", 0) + (1 - beta) * square.mean(1, keepdim=True)
    column = memory["c"] = beta * memory.get("c", 0) + (1 - beta) * square.mean(0, keepdim=True)
    u = g / (row * column / row.mean()).sqrt()
    u = u / max(1.0, u.pow(2).mean().sqrt().item())
    return x - train.lr * u - train.lr * train.weight_decay * x


def schedule_free(x, g, t, memory, train):
    """Defazio et al. 2024, "The Road Less Scheduled", algorithm 1; returns y, where gradients are taken."""
    z, average = memory.get("z", x), memory.get("x", x)
    v = memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g**2
    step = g / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    z = memory["z"] = z - train.lr * (step + train.weight_decay * x)
    average = memory["x"] = (1 - 1 / t) * average + 1 / t * z
    return (1 - 0.9) * z + 0.9 * average


def adamw(x, g, t, memory, train):
    """Loshchilov & Hutter 2019, algorithm 2."""
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g**2
    step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return x - train.lr * (step + train.weight_decay * x)


def prodigy(x, g, t, memory, train):
    """Mishchenko & Defazio 2024, algorithm 4."""
    d0 = train.optimizer_params.d0
    d, b3 = memory.get("d", d0), math.sqrt(0.999)
    x0 = memory.setdefault("x0", x)
    rate = train.lr
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * d * g
    v = memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * d**2 * g**2
    r = memory["r"] = b3 * memory.get("r", 0) + rate * d**2 / d0 * (g * (x0 - x)).sum()
    s = memory["s"] = b3 * memory.get("s", 0) + rate * d**2 / d0 * g
    memory["d"] = max(d, (r / s.abs().sum()).item())
    return x - rate * d * train.weight_decay * x - rate * d * m / (v.sqrt() + memory["d"] * 1e-8)


@pytest.mark.parametrize(
    ("name", "reference", "lr"),
    [
        ("adamw", adamw, 1e-2),
        ("adamw8bit", adamw, 1e-2),  # so small a matrix has moments in fp32
        ("adafactor", adafactor, 1e-2),
        ("lion", lion, 1e-2),
        ("schedule_free_adamw", schedule_free, 1e-2),
        ("prodigy", prodigy, 1.0),
    ],
)
def test_it_follows_the_formula_of_its_paper(name, reference, lr):
    own = {"optimizer_params": {"d0": 1e-3}} if name == "prodigy" else {}
    worst, moved = quadratic(name, reference, lr=lr, weight_decay=0.1, **own)
    assert moved > 1e-5
    assert worst < 2e-3 * moved


@pytest.mark.parametrize(
    "options", [{}, {"d_coef": 2.0}, {"use_bias_correction": True, "d0": 1e-4}, {"safeguard_warmup": True}], ids=str
)
def test_prodigy_gives_the_numbers_of_the_library_where_that_works(options):
    from pytorch_optimizer.optimizer.prodigy import Prodigy as Theirs

    names = {"use_bias_correction": "bias_correction"}
    given = {names.get(key, key): value for key, value in options.items()}
    ours, theirs = fresh(), fresh()
    train_config = config("prodigy", weight_decay=0.01, optimizer_params=options)
    pair = build_optimizer(ours, train_config), Theirs(theirs, weight_decay=0.01, **given)
    for optimizer, parameters in zip(pair, (ours, theirs), strict=True):
        for step in range(14):
            for number, parameter in enumerate(parameters):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(97 * step + number))
                parameter.grad = parameter.detach() + 0.1 * noise
            optimizer.param_groups[0]["lr"] = min(1.0, (step + 1) / 10)
            optimizer.step()
    assert pair[0].param_groups[0]["d"] == pytest.approx(pair[1].param_groups[0]["d"], rel=1e-4)
    assert pair[0].param_groups[0]["d"] > 1e-4
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_prodigy_with_a_rate_of_its_own_is_prodigy_in_scaled_variables():
    """x = c y: the same steps in y give the same estimate and the same x."""
    scale, train_config = 4.0, config("prodigy", weight_decay=0.0, optimizer_params={"d0": 1e-3})
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    plain, scaled = torch.nn.Parameter(start.clone()), torch.nn.Parameter(scale * start)
    one = build_optimizer([plain], train_config)
    other = build_optimizer([{"params": [scaled], "lr_scale": scale}], train_config)
    other.param_groups[0]["lr"] = scale
    for step in range(20):
        noise = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        plain.grad = plain.detach() + noise
        scaled.grad = (scaled.detach() / scale + noise) / scale  # of the same function of y
        one.step()
        other.step()
    assert one.param_groups[0]["d"] == pytest.approx(other.param_groups[0]["d"], rel=1e-4)
    assert one.param_groups[0]["d"] > 2e-3
    assert torch.allclose(scaled / scale, plain, rtol=1e-4, atol=1e-5)


def test_prodigy_says_the_rate_that_an_update_was_made_with():
    parameters = fresh()
    optimizer = build_optimizer(parameters, config("prodigy"))
    for step in range(5):
        before = optimizer.param_groups[0]["d"]
        train(optimizer, parameters, [step + 10], 1.0)
        assert optimizer.d_used == before
    assert optimizer.param_groups[0]["d"] > 1e-6


# ---------------------------------------------------------------------- refusals
def test_an_8_bit_optimizer_without_a_kernel_for_the_device_is_refused_by_the_name_of_the_field(monkeypatch):
    monkeypatch.setattr(build, "has_kernel", lambda device: False)
    with pytest.raises(ConfigurationError, match=r"config\.train\.optimizer: adamw8bit has no kernel for cpu"):
        build_optimizer(fresh(), config("adamw8bit"))


def test_kernels_are_known_by_device():
    build_optimizer(fresh(), config("adamw8bit"))
    assert build.has_kernel(torch.device("cpu"))
    assert not build.has_kernel(torch.device("mps"))


def test_without_bitsandbytes_the_message_says_so(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigurationError, match="needs bitsandbytes"):
        build_optimizer(fresh(), config("adamw8bit"))
