"""A sharded model trains what a whole one does, and its checkpoints are the same files.

Two real ranks, on the CPU. Gradients of two ranks are summed in another order than those of one process, and Adam divides
by their size: numbers agree within rounding, counters exactly, and a resume on the same ranks to the bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.exit_codes import ExitCode
from lora_api.network import NetworkConfig
from lora_api.parallelism import is_sharded
from lora_api.run import config_hash
from lora_trainer import checkpoint
from lora_trainer.networks import add_adapter, train_all
from lora_trainer.runtime import Group
from lora_trainer.sharding import adds_up_whole, blocks_of, shard
from lora_trainer.spread import gradient_norm
from tests.trainer.jobs import Job, answer, make_pictures
from tests.trainer.ranks import counters, log_of, run_on_two_ranks, twin

CPU = torch.device("cpu")
STEPS, HALF, LR = 4, 2, 1e-3
FULL = "transformer/diffusion_pytorch_model.safetensors"
SAMPLE = {"prompts": ["a"], "width": 32, "height": 32, "sample_steps": 2, "sample_every": HALF}
SHARDED = {"batch_size": 1, "gradient_accumulation": 2}
ALONE = {"batch_size": 2, "gradient_accumulation": 2}


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_model_folder):
    """Jobs over the same four pictures."""
    data = make_pictures(tmp_path_factory.mktemp("data"), [(64, 64)] * 4)
    root, cache = tmp_path_factory.mktemp("jobs"), tmp_path_factory.mktemp("cache")

    def job(name: str, arch: str, network: str, train: dict) -> Job:
        train = {"steps": STEPS, "lr": LR, "dtype": "fp32", **train}
        made = Job(root / name, tiny_model_folder(arch), data, cache, arch, train=train, sample=SAMPLE)
        return made.change(network={"type": network}, save={"save_every": HALF})

    return job


@pytest.fixture(scope="module")
def alone(make):
    """Full fine-tuning in one process."""
    job = make("alone", "zimage", "full", ALONE)
    assert job.run() == ExitCode.DONE
    return job


@pytest.fixture(scope="module")
def sharded(make):
    """The same on two ranks, which share the weights unless told otherwise."""
    job = make("sharded", "zimage", "full", SHARDED)
    assert run_on_two_ranks(job) == ExitCode.DONE, log_of(job)[-3000:]
    return job


def losses(job: Job, start: int = 1) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in job.metrics(start) if "loss" in line}


def tensors(job: Job, name: str) -> dict[str, torch.Tensor]:
    return load(job.newest()[name])


def same_numbers(one: Job, other: Job) -> None:
    """Adapter and moments agree; an Adam update is `lr` however small its gradient is, so rounding shows as a share of it."""
    for name, scale in ((checkpoint.ADAPTER, LR), (checkpoint.OPTIMIZER, 1.0)):
        first, second = tensors(one, name), tensors(other, name)
        assert {k: (t.shape, t.dtype) for k, t in first.items()} == {k: (t.shape, t.dtype) for k, t in second.items()}
        for key, tensor in first.items():
            torch.testing.assert_close(
                tensor, second[key], rtol=1e-3, atol=0.05 * scale, msg=lambda m, k=key: f"{k}: {m}"
            )
    assert counters(one) == counters(other)


# ---------------------------------------------------------------------- whole runs
def test_sharded_weights_train_what_one_process_trains_and_leave_the_same_files(alone, sharded):
    assert log_of(sharded).count("the denoiser is sharded over 2 ranks") == 2
    assert losses(sharded) == pytest.approx(losses(alone), rel=1e-4)
    norms = [{line["step"]: line["grad_norm"] for line in job.metrics() if "loss" in line} for job in (alone, sharded)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert min(norms[0].values()) > 1  # so that clipping took part
    same_numbers(alone, sharded)
    keys = [sorted(item.key for item in job.store.list() if "metrics" not in item.key) for job in (alone, sharded)]
    assert keys[0] == keys[1]
    finals = [load(job.store.get(layout.FINAL + FULL)) for job in (alone, sharded)]
    assert finals[0].keys() == finals[1].keys()
    assert all(torch.isfinite(tensor).all() for tensor in finals[1].values())


def test_a_resume_on_the_same_ranks_changes_no_bit(sharded):
    again = twin(sharded, "again", HALF)
    assert run_on_two_ranks(again) == ExitCode.DONE, log_of(again)[-3000:]
    assert again.progress().resumed_from_step == HALF
    assert again.newest() == sharded.newest()
    first, second = (load(job.store.get(layout.FINAL + FULL)) for job in (sharded, again))
    assert all(torch.equal(first[key], second[key]) for key in first | second)


def test_a_run_goes_from_two_sharded_ranks_to_one_process(alone, sharded):
    on = twin(sharded, "to-one", HALF, train=ALONE)
    assert on.run() == ExitCode.DONE
    assert losses(on, start=2) == pytest.approx({s: x for s, x in losses(alone).items() if s > HALF}, rel=1e-4)
    same_numbers(alone, on)


def test_a_run_goes_from_one_process_to_two_sharded_ranks(alone, sharded):
    on = twin(alone, "to-two", HALF, train=SHARDED | {"parallelism": "fsdp"})
    assert run_on_two_ranks(on) == ExitCode.DONE, log_of(on)[-3000:]
    assert on.progress().resumed_from_step == HALF
    same_numbers(sharded, on)


def test_a_run_goes_from_shares_to_copies(sharded):
    on = twin(sharded, "to-copies", HALF, train={"parallelism": "ddp"})
    assert run_on_two_ranks(on) == ExitCode.DONE, log_of(on)[-3000:]
    assert "is sharded" not in log_of(on).rpartition("resumed from")[0].rpartition("committed")[2]
    same_numbers(sharded, on)


def test_adapters_over_a_sharded_base_train_what_one_process_trains(make):
    one = make("adapter-alone", "flux2_klein_4b", "lora", ALONE)
    assert one.run() == ExitCode.DONE
    two = make("adapter-sharded", "flux2_klein_4b", "lora", SHARDED | {"parallelism": "fsdp"})
    assert run_on_two_ranks(two) == ExitCode.DONE, log_of(two)[-3000:]
    assert log_of(two).count("the denoiser is sharded over 2 ranks, in 3 blocks") == 2
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    same_numbers(one, two)
    final = layout.FINAL + "adapter.safetensors"
    assert load(two.store.get(final)).keys() == load(one.store.get(final)).keys()


# ---------------------------------------------------------------------- its parts, on a group of one
@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, CPU)
    dist.destroy_process_group()


def test_transformers_are_sharded_block_by_block(load_tiny):
    for arch in ("zimage", "flux2_klein_4b", "flux1", "qwen_image", "wan21"):
        model = load_tiny(arch)
        blocks = blocks_of(model.denoiser)
        inside = {id(module) for block in blocks for module in block.modules()}
        modules = dict(model.denoiser.named_modules())
        assert len(blocks) >= 2, arch
        assert [name for name in model.default_targets() if id(modules[name]) not in inside] == [], arch


def test_inner_blocks_come_before_outer_ones(load_tiny):
    blocks = blocks_of(load_tiny("sd15").denoiser)
    for number, block in enumerate(blocks):
        assert not any(later in list(block.modules())[1:] for later in blocks[number + 1 :])


def test_a_denoiser_without_blocks_is_refused_and_not_gathered_whole():
    with pytest.raises(ValueError, match="Linear has no blocks to shard by; set it to ddp"):
        blocks_of(torch.nn.Linear(2, 2))


def test_two_denoisers_are_refused(load_tiny, group):
    with pytest.raises(ValueError, match="several denoisers"):
        shard(load_tiny("wan22"), group, ())


def test_the_sharded_model_answers_as_the_whole_one_to_the_bit(load_tiny, group):
    expected = answer(load_tiny("zimage"))
    model = load_tiny("zimage")
    spread = shard(model, group, ())
    assert torch.equal(answer(model), expected)
    spread.settled()
    assert torch.equal(answer(model), expected)


def test_micro_batches_add_up_whole_gradients_and_the_last_one_shares_them(load_tiny, group):
    model = load_tiny("zimage")
    spread = shard(model, group, ())
    trained = train_all(model, NetworkConfig(type="full"), spread)
    parameters = trained.parameters()

    def backward():
        from tests.trainer.jobs import noisy_pictures

        x, sigma, conditioning = noisy_pictures(model)
        model.velocity(x, sigma, conditioning).pow(2).mean().backward()

    backward()
    once = [gradient.clone() for gradient in spread.held([p.grad for p in parameters if p.grad is not None])]
    model.denoiser.zero_grad()
    with spread.without_sync():
        backward()
        assert all(parameter.grad is None for parameter in parameters)
    backward()
    twice = spread.held([p.grad for p in parameters if p.grad is not None])
    assert len(twice) == len(once) > 0
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(two, 2 * one)


def test_gradients_are_clipped_as_torch_does_it(load_tiny, group):
    model = load_tiny("zimage")
    spread = shard(model, group, ())
    parameters = train_all(model, NetworkConfig(type="full"), spread).parameters()
    plain = []
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.grad = spread.like(parameter, gradient)
        plain.append(torch.nn.Parameter(torch.zeros(parameter.shape)))
        plain[-1].grad = gradient
    norm = spread.norm(spread.held([p.grad for p in parameters]))
    assert norm == pytest.approx(gradient_norm([p.grad for p in plain]).item(), rel=1e-5)
    spread.clip(parameters, 0.5, norm)
    torch.nn.utils.clip_grads_with_norm_(plain, 0.5, norm)
    for parameter, expected in zip(parameters, plain, strict=True):
        assert torch.equal(spread.whole(parameter.grad), expected.grad)


def test_adapters_stay_whole_and_the_base_lies_in_shares(load_tiny, group):
    from torch.distributed.tensor import DTensor

    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=2), seed=0)
    spread = shard(model, group, adapter.parameters())
    mine = {id(parameter) for parameter in adapter.parameters()}
    for name, parameter in model.denoiser.named_parameters():
        assert isinstance(parameter, DTensor) is (id(parameter) not in mine), name
    assert spread.apart(adapter.parameters()) == adapter.parameters()


# ---------------------------------------------------------------------- what is decided
@pytest.mark.parametrize(
    ("gradients", "device", "expected"), [(10, None, True), (10, 40, True), (11, 40, False), (0, 1, True)]
)
def test_whole_gradients_are_kept_where_they_take_a_quarter_of_the_gpu_at_most(gradients, device, expected):
    assert adds_up_whole(gradients, device) is expected


@pytest.mark.parametrize(
    ("wish", "network", "processes", "expected"),
    [
        ("auto", "full", 2, True),
        ("auto", "full", 1, False),
        ("auto", "lora", 8, False),
        ("ddp", "full", 2, False),
        ("fsdp", "lora", 2, True),
        ("fsdp", "lora", 1, False),
    ],
)
def test_what_is_trained_whole_is_sharded_unless_told_otherwise(wish, network, processes, expected):
    assert is_sharded(configured(wish, network), processes) is expected


def test_how_processes_share_the_work_is_no_part_of_what_is_trained():
    assert len({config_hash(configured(wish, "full")) for wish in ("auto", "ddp", "fsdp")}) == 1


def configured(wish: str, network: str) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": {"arch": "zimage", "name_or_path": "/m"},
            "datasets": [{"folder_path": "/d"}],
            "network": {"type": network},
            "train": {"parallelism": wish},
        }
    )
