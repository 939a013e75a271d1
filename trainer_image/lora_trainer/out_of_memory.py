"""Device memory that ran out: how it is known among errors, and what to do where it happened."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from lora_api.run import Stage

_WORDS = re.compile(
    r"DefaultCPUAllocator"
    r"|CUDA error: out of memory|CUDA out of memory|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|NCCL.*out of memory",
    re.IGNORECASE | re.DOTALL,
)
"""Errors of libraries that are not torch.OutOfMemoryError, but mean the same."""

_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"loading|sharding|merging",
        (
            "the base model alone does not fit: use a larger GPU, or share its weights among several GPUs with "
            "train.parallelism: fsdp"
        ),
    ),
    (r"encoding", "one picture or caption is encoded at a time: lower the resolution of datasets, or use a larger GPU"),
    (r"drawing", "lower sample.width, sample.height or sample.num_frames"),
    (r"saving|exporting|writing", "leave it more room: lower train.batch_size or the resolution of datasets"),
)
_STEP_ADVICE = (
    "halve train.batch_size and double train.gradient_accumulation (the same samples per step), set "
    "train.gradient_checkpointing: true, or lower the resolution of datasets"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that the device has no memory left."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return any(
        (isinstance(kind, type) and isinstance(each, kind))
        or (isinstance(each, RuntimeError) and _WORDS.search(str(each)) is not None)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def deepest(error: BaseException) -> BaseException:
    """The error that the others were raised from: the allocator's own words."""
    return list(_chain(error))[-1]


def doing(stage: Stage, detail: str) -> str:
    """What was being done, for the middle of a sentence."""
    words = {
        "Initializing": "starting",
        "PreparingData": "preparing",
        "Training": "training",
        "Finalizing": "finishing",
    }
    return detail or words[stage]


def advice(stage: Stage, detail: str) -> str:
    """What helps, by what was being done."""
    for pattern, text in _ADVICE:
        if re.match(pattern, detail):
            return text
    return _STEP_ADVICE if stage == "Training" else _ADVICE[0][1]
