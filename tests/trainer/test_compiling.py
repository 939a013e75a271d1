"""Blocks compiled one by one: the wiring with torch's own back ends, and inductor where a compiler is."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lora_api.network import NetworkConfig
from lora_trainer.memory.blocks import repeated_blocks
from lora_trainer.memory.compiling import compile_blocks, why_not
from lora_trainer.networks import add_adapter
from tests.trainer.jobs import disturb, noisy_pictures


def gradients(load_tiny, tmp_path, backend, arch="zimage", checkpointing=False):
    model = load_tiny(arch)
    adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
    disturb(adapter, std=0.05)
    if checkpointing:
        model.enable_gradient_checkpointing()
    if backend is not None:
        assert compile_blocks(model, tmp_path, backend=backend) == len(repeated_blocks(model.denoiser))
    v = model.velocity(*noisy_pictures(model))
    v.pow(2).mean().backward()
    return v.detach(), torch.cat([p.grad.flatten() for p in adapter.parameters()])


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Compiled code and settings are global: each test begins without, and leaves none."""
    import torch._dynamo

    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set")  # so that it is put back
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("backend", "checkpointing"), [("eager", True), ("aot_eager", False)])
def test_compiled_blocks_answer_and_learn_as_before(backend, checkpointing, load_tiny, tmp_path):
    v, expected = gradients(load_tiny, tmp_path, None)
    found_v, found = gradients(load_tiny, tmp_path, backend, checkpointing=checkpointing)
    torch.testing.assert_close(found_v, v, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-3)


class Block(nn.Module):
    """A block of a few operations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).tanh() + x


@pytest.mark.skipif(why_not("cpu") is not None, reason="no C++ compiler")
def test_inductor_compiles_a_block_and_keeps_its_code_in_the_cache_folder(tmp_path):
    denoiser = nn.Module()
    denoiser.blocks = nn.ModuleList([Block()])
    x = torch.randn(4, 8, requires_grad=True)
    expected = denoiser.blocks[0](x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    assert compile_blocks(SimpleNamespace(denoiser=denoiser, device=torch.device("cpu")), tmp_path) == 1
    found = denoiser.blocks[0](x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x)[0], gradient)
    assert list((tmp_path / "compiled" / "inductor").rglob("*.py"))


def test_without_a_compiler_blocks_run_as_they_are_and_the_log_says_so(load_tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert compile_blocks(load_tiny("zimage"), tmp_path) == 0
    assert "there is no C++ compiler" in caplog.text


def test_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_not("cuda") == "the package triton is not installed"
