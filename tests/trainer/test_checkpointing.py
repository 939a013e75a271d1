"""Gradient checkpointing of every n-th block, for every family: the same loss and gradients to the bit, less kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lora_api.archs import Arch
from lora_api.network import NetworkConfig
from lora_trainer.memory.checkpointing import EveryNth
from lora_trainer.networks import add_adapter
from tests.trainer.test_memory_activations import saved_bytes

FAMILIES = [arch for arch in Arch if arch != "flux2_klein_9b"]


def gradients(load_tiny, arch, *call, on=True):
    """Loss, gradients, and the bytes that were kept for the backward pass."""
    model = load_tiny(arch)
    adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
    if on:
        model.enable_gradient_checkpointing(*call)
    x0 = torch.stack([model.encode_pixels(torch.zeros(1, 3, 64, 64))] * 2)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    corrupted = model.corrupt(x0, noise, torch.tensor([0.3, 0.8]))
    conditioning = model.collate([model.encode_text("a red cube")] * 2)
    outcome = []

    def run():
        prediction = model.predict(corrupted.x_t, corrupted.time, conditioning)
        outcome.append((prediction - corrupted.target).square().mean())

    kept = saved_bytes(run, model.denoiser.parameters())
    outcome.clear()
    run()
    outcome[0].backward()
    return outcome[0].detach(), torch.cat([p.grad.flatten() for p in adapter.parameters()]), kept


@pytest.mark.parametrize("arch", FAMILIES)
def test_loss_and_gradients_are_the_same_to_the_bit_whatever_is_recomputed(arch, load_tiny):
    loss, plain, kept_all = gradients(load_tiny, arch, on=False)
    _, _, kept_least = gradients(load_tiny, arch)
    assert plain.any()
    for call in ((), (EveryNth(1),), (EveryNth(2),)):
        found_loss, found, kept = gradients(load_tiny, arch, *call)
        assert torch.equal(found_loss, loss)
        assert torch.equal(found, plain)
        assert kept_least <= kept < kept_all


def test_every_second_block_is_recomputed_and_the_others_are_kept(load_tiny):
    keeps = {every: gradients(load_tiny, "qwen_image", EveryNth(every))[2] for every in (1, 2, 1000)}
    assert keeps[1] < keeps[2] <= keeps[1000]


@pytest.mark.parametrize("arch", ["flux1", "qwen_image", "sdxl"])
def test_text_encoders_and_the_vae_s_encoder_are_really_gone_once_everything_is_cached(arch, load_tiny):
    model = load_tiny(arch)
    model.encode_pixels(torch.zeros(1, 3, 64, 64))
    model.encode_text("a red cube")
    modules = [getattr(model.pipe, part) for part in model.text_parts] + [model.pipe.vae.encoder]
    watched = [weakref.ref(tensor) for module in modules for tensor in module.parameters()]
    shared = {id(p) for p in model.pipe.vae.decoder.parameters()}
    assert watched
    assert not shared & {id(ref()) for ref in watched}
    del modules
    model.free_encoders()
    gc.collect()
    assert [ref for ref in watched if ref() is not None] == []
