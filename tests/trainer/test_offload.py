"""Blocks that rest in CPU memory: the same losses and gradients to the bit, and only a few of them on the device."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import nn

from lora_api.archs import Arch
from lora_api.config import ModelConfig
from lora_api.network import NetworkConfig
from lora_trainer.memory.blocks import repeated_blocks
from lora_trainer.memory.checkpointing import EveryNth
from lora_trainer.memory.offload import Offload, chosen
from lora_trainer.memory.placing import offload_blocks, place_base
from lora_trainer.memory.quantised import put_weight, quantise_blocks
from lora_trainer.networks import add_adapter
from lora_trainer.runtime import Group
from tests.trainer.jobs import Job, disturb, make_pictures
from tests.trainer.ranks import run_on_two_ranks

CPU = torch.device("cpu")


def trained(load_tiny, arch, *, share=0.0, every=None, quantize=None):
    """Loss and gradients of a forward and backward pass, with the offload that served it."""
    model = load_tiny(arch)
    config = ModelConfig(arch=arch, name_or_path="/m", quantize=quantize, offload_blocks=share)
    place_base(model, config, CPU)
    adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
    disturb(adapter, std=0.05)
    offload = offload_blocks(model, config, CPU)
    if every is not None:
        model.enable_gradient_checkpointing(EveryNth(every))
    x0 = torch.stack([model.encode_pixels(torch.zeros(1, 3, 64, 64))] * 2)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    corrupted = model.corrupt(x0, noise, torch.tensor([0.3, 0.8]))
    conditioning = model.collate([model.encode_text("a red cube")] * 2)
    losses = []
    for _ in range(2):  # what a step leaves behind must not disturb the next one
        loss = (model.predict(corrupted.x_t, corrupted.time, conditioning) - corrupted.target).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([p.grad.flatten() for p in adapter.parameters()]), offload, model


@pytest.mark.parametrize("arch", [arch for arch in Arch if arch not in ("flux2_klein_9b", "zimage:turbo")])
def test_losses_and_gradients_are_the_same_to_the_bit(arch, load_tiny):
    losses, gradients, nothing, _ = trained(load_tiny, arch)
    assert nothing is None
    for every in (None, 1):
        found_losses, found, offload, model = trained(load_tiny, arch, share=1.0, every=every)
        assert torch.equal(found_losses, losses)
        assert torch.equal(found, gradients)
        assert offload.fetched > 2 * len(repeated_blocks(model.denoiser))  # more than the two forward passes
        assert offload.visiting <= 1


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
@pytest.mark.parametrize("every", [None, 2])
def test_quantised_blocks_rest_too(quantize, every, load_tiny):
    losses, gradients, _, _ = trained(load_tiny, "zimage", quantize=quantize)
    found_losses, found, offload, _ = trained(load_tiny, "zimage", share=1.0, quantize=quantize, every=every)
    assert torch.equal(found_losses, losses)
    assert torch.equal(found, gradients)
    assert offload.resting_bytes > 0


class Block(nn.Module):
    """Two layers, of which the second shares nothing with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_nothing_that_visits_is_kept_for_the_backward_pass():
    blocks = [Block().requires_grad_(requires_grad=False) for _ in range(3)]
    offload = Offload(CPU)
    for block in blocks:
        offload.add(block)
    resting = {t.untyped_storage().data_ptr() for block in blocks for t in block.parameters()}
    x = torch.randn(2, 8, requires_grad=True)
    seen = []
    original = Offload._fetch

    def fetch(self, number):
        visit = original(self, number)
        seen.extend(visit.tensors)
        return visit

    Offload._fetch = fetch
    try:
        y = x
        for block in blocks:
            y = block(y)
        assert offload.visiting == 0
        count = offload.fetched
        y.sum().backward()
    finally:
        Offload._fetch = original
    assert offload.fetched == count + len(blocks)
    assert not resting & {t.untyped_storage().data_ptr() for t in seen}
    assert x.grad.abs().sum() > 0
    assert all(isinstance(p, nn.Parameter) for block in blocks for p in block.parameters())


def test_the_graph_keeps_no_visitor_alive(monkeypatch):
    blocks = [Block().requires_grad_(requires_grad=False) for _ in range(3)]
    offload, seen = Offload(CPU), []
    original = Offload._fetch

    def fetch(self, number):
        visit = original(self, number)
        seen.extend(weakref.ref(tensor) for tensor in visit.tensors)
        return visit

    monkeypatch.setattr(Offload, "_fetch", fetch)
    x = torch.randn(2, 8, requires_grad=True)
    y = x
    for block in blocks:
        offload.add(block)
        y = block(y)
    assert len(seen) == 12
    assert not [each for each in seen if each() is not None]
    y.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("every", [None, 1, 2])
def test_blocks_are_sent_for_in_the_order_in_which_they_come_and_only_two_are_there(every, monkeypatch):
    count, fetched, most = 6, [], 0
    blocks = [Block().requires_grad_(requires_grad=False) for _ in range(count)]
    offload = Offload(CPU)
    offload._ahead = True  # as on a GPU, where copying does not wait
    original = Offload._fetch

    def fetch(self, number):
        nonlocal most
        fetched.append(number)
        most = max(most, 1 + len(self._visits.keys() - {number}))
        return original(self, number)

    monkeypatch.setattr(Offload, "_fetch", fetch)
    for block in blocks:
        offload.add(block)
    call = EveryNth(every) if every else (lambda block, x: block(x))
    y = torch.randn(2, 8, requires_grad=True)
    for block in blocks:
        y = call(block, y)
    assert fetched == list(range(count))
    y.sum().backward()
    assert fetched == [*range(count), *reversed(range(count))]
    assert most == 2
    assert offload.visiting <= 1


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_weight_that_changes_while_it_rests_is_fetched_again(kind):
    block = Block().requires_grad_(requires_grad=False)
    if kind is not None:
        quantise_blocks([block], kind, CPU)
    offload = Offload(CPU)
    offload.add(block)
    x = torch.randn(2, 8, requires_grad=True)
    block(x).sum().backward()
    assert offload.visiting == 1
    put_weight(block.second, torch.zeros(8, 8))
    assert torch.equal(block(x), block.second.bias.expand(2, 8))


def test_what_is_trained_in_a_block_stays_and_learns():
    block = Block()
    block.first.requires_grad_(requires_grad=False)
    offload = Offload(CPU)
    offload.add(block)
    block(torch.randn(2, 8)).sum().backward()
    assert block.second.weight.grad is not None
    assert offload.resting_bytes == (64 + 8) * 4


def test_an_error_in_a_block_leaves_its_weights_where_they_rest():
    block = Block().requires_grad_(requires_grad=False)
    offload = Offload(CPU)
    offload.add(block)
    before = block.first.weight
    with pytest.raises(RuntimeError):
        block(torch.randn(2, 9))
    assert block.first.weight is before


@pytest.mark.parametrize(("share", "count"), [(1.0, 10), (0.5, 5), (0.3, 3), (0.05, 0)])
def test_the_share_of_blocks_that_rest_is_spread_evenly(share, count):
    blocks = [nn.Identity() for _ in range(10)]
    found = chosen(blocks, share)
    assert len(found) == count
    places = [blocks.index(block) for block in found]
    assert all(later - earlier >= int(1 / share) for earlier, later in itertools.pairwise(places))


def test_a_run_with_resting_blocks_is_the_same_run(tmp_path, tiny_model_folder, monkeypatch):
    job = Job(tmp_path / "plain", tiny_model_folder("zimage"), make_pictures(tmp_path / "data"), tmp_path / "cache")
    job.change(train={"steps": 4}, sample={"prompts": ["a cube"], "width": 64, "height": 64, "sample_steps": 1})
    wrap, ignored = Group.wrap, []
    monkeypatch.setattr(
        Group,
        "wrap",
        lambda self, module, **options: (
            ignored.append(getattr(module, "_ddp_params_and_buffers_to_ignore", None)) or wrap(self, module, **options)
        ),
    )
    twin = job.copy("resting").change(model={"offload_blocks": 1.0}, train={"gradient_checkpointing": True})
    assert job.run() == twin.run() == 0
    assert job.newest()["adapter.safetensors"] == twin.newest()["adapter.safetensors"]
    assert job.store.get("final/sample-00.png") == twin.store.get("final/sample-00.png")
    nothing, resting = ignored  # DDP, which is told what rests before it looks at where parameters lie
    assert nothing is None
    assert resting


def test_blocks_may_rest_on_several_ranks(tmp_path, tiny_model_folder):
    job = Job(
        tmp_path / "plain", tiny_model_folder("wan22"), make_pictures(tmp_path / "data"), tmp_path / "cache", "wan22"
    )
    job.change(train={"steps": 3, "gradient_accumulation": 2, "gradient_checkpointing": True})
    twin = job.copy("resting").change(model={"offload_blocks": 1.0})
    for each in (job, twin):
        each.write()
        assert run_on_two_ranks(each) == 0
    assert job.newest()["adapter.safetensors"] == twin.newest()["adapter.safetensors"]
