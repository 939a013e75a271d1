"""Device memory that runs out is called so, with what was being done and what helps there."""

from __future__ import annotations

import sys

import pytest
import torch

from lora_api.exit_codes import ExitCode
from lora_trainer import endings
from lora_trainer.errors import ConfigurationError
from lora_trainer.out_of_memory import advice, is_out_of_memory
from tests.trainer.jobs import ROOT, Job, make_pictures

SITE = str(ROOT / "tests" / "trainer" / "faulty")


@pytest.fixture
def job(tmp_path, tiny_model_folder, monkeypatch):
    """A job of a family whose memory runs out where `FAULT` says."""
    monkeypatch.syspath_prepend(SITE)
    yield Job(
        tmp_path / "job", tiny_model_folder("zimage"), make_pictures(tmp_path / "data"), tmp_path / "cache", "x-faulty",
        train={"steps": 2, "batch_size": 2},
        sample={"prompts": ["a"], "width": 32, "height": 32, "sample_steps": 1, "sample_every": 1},
    )  # fmt: skip
    sys.modules.pop("faulty_family", None)


@pytest.mark.parametrize(
    ("fault", "doing", "helps"),
    [
        ("0:load:1:oom", "loading the base model", "train.parallelism: fsdp"),
        ("0:encode:2:oom", "encoding 2/5 pictures", "lower the resolution of datasets"),
        ("0:forward:1:oom", "training step 1, forward pass of 2 pictures of ", "halve train.batch_size"),
        ("0:batch:1:oom", "training step 1, making a batch", "halve train.batch_size"),
        ("0:forward:2:oom", "training step 2, forward pass of 2 pictures of ", "train.gradient_checkpointing: true"),
    ],
)
def test_what_was_being_done_is_named_and_what_helps_there(job, monkeypatch, fault, doing, helps):
    monkeypatch.setenv("FAULT", fault)
    assert job.run() == ExitCode.OUT_OF_MEMORY
    message = job.word().message
    assert message.startswith(f"out of device memory while {doing}")
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in message
    assert helps in message.partition("; ")[2]
    assert job.progress().exit == job.word()


def test_a_backward_pass_is_told_from_a_forward_pass(job, monkeypatch):
    from lora_trainer import loop

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(_context, x):
            return x.clone()

        @staticmethod
        def backward(_context, _gradient):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    loss_of = loop.loss_of
    monkeypatch.setattr(loop, "loss_of", lambda *given, **more: tuple(map(Greedy.apply, loss_of(*given, **more))))
    assert job.run() == ExitCode.OUT_OF_MEMORY
    assert job.word().message.startswith(
        "out of device memory while training step 1, backward pass of 2 pictures of 64 x 64: "
    )


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL Error 1: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    ],
)
def test_libraries_have_other_words_for_it(text):
    assert endings.code_of(RuntimeError(text)) == ExitCode.OUT_OF_MEMORY


@pytest.mark.parametrize("error", [RuntimeError("the size of tensor a must match"), ValueError("out of memory lane")])
def test_other_errors_are_not_mistaken_for_it(error):
    assert not is_out_of_memory(error)


def test_an_error_that_was_put_into_other_words_is_still_known():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        except RuntimeError as error:
            raise ConfigurationError("config.model.name_or_path: could not be loaded") from error
    except ConfigurationError as error:
        word = endings.word_of(error, 0, stage="PreparingData", doing="loading the base model")
    assert word.code == ExitCode.OUT_OF_MEMORY
    assert word.message.startswith("out of device memory while loading the base model: CUDA out of memory. Tried to")


def test_each_place_has_its_own_advice():
    places = (
        "loading the base model",
        "encoding 1/2 pictures",
        "drawing sample 1/2",
        "saving step 4",
        "training step 5, update",
    )
    assert len({advice("Training", detail) for detail in places}) == len(places)
