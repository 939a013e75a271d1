"""The denoiser's blocks compiled one by one: all that are alike share their code, so a start waits for few of them.

Compiled code is kept in the cache folder from start to start. Sizes that vary (pictures in buckets, captions) become
symbols of the code when a second one is met. What can't be compiled runs as it is.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.memory.blocks import repeated_blocks

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

log = logging.getLogger(__name__)

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_VERSIONS = (
    64  # of a block's code, for its sizes and modes, before torch gives up; its own limit of 8 is for one module
)


def why_not(kind: str) -> str | None:
    """Why nothing can be compiled for a kind of device; None where it can."""
    if kind == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton is not installed"
    named = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return (
        None if any(name and shutil.which(name) for name in named) else "there is no C++ compiler (CXX, g++, clang++)"
    )


def compile_blocks(model: BaseModel, cache_folder: Path, *, backend: str = "inductor") -> int:
    """Compiles the blocks of a denoiser, each when it is first called; returns how many.

    Args:
        model: With its adapter.
        cache_folder: Where compiled code is kept, unless torch's own variables name other folders.
        backend: Of torch.compile.
    """
    reason = why_not(model.device.type) if backend == "inductor" else None
    if reason is not None:
        log.warning("train.compile: true, but %s; blocks run uncompiled", reason)
        return 0
    for variable, name in _FOLDERS.items():
        os.environ.setdefault(variable, str(cache_folder / "compiled" / name))
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True  # noqa: SLF001 its public place: a block that fails runs as it is
    torch._dynamo.config.recompile_limit = _VERSIONS  # noqa: SLF001 as above
    blocks = repeated_blocks(model.denoiser)
    for block in blocks:
        block.compile(backend=backend)
    log.info("%d blocks are compiled when they are first called (%s)", len(blocks), backend)
    return len(blocks)
