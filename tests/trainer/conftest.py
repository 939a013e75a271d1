"""Tiny models for the trainer's tests: made once for each run of pytest, never written to by a test."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: more threads make tiny models slower, not faster
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ARCHS = ("zimage", "flux2_klein_4b")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model_folder("zimage")`: a read-only tiny model of that family."""
    root = tmp_path_factory.mktemp("tiny-models")

    def folder(arch: str) -> Path:
        from lora_trainer.tiny import make_tiny

        if not (root / arch).exists():
            make_tiny(arch, root / arch)
            _keep_libraries_out_of_collections()
        return root / arch

    return folder


def _keep_libraries_out_of_collections() -> None:
    """Every start of a job collects garbage, which walks over all objects: half a million of them are the libraries'."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    yield
    gc.unfreeze()


@pytest.fixture
def load_tiny(tiny_model_folder):
    """`load_tiny("zimage")`: a freshly loaded base model, fp32 on the CPU."""
    import torch

    from lora_trainer.families import family_for

    def load(arch: str, dtype: torch.dtype = torch.float32):
        return family_for(arch).load(tiny_model_folder(arch), dtype=dtype, device=torch.device("cpu"))

    return load


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return request.param
