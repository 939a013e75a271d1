"""Which number format a run computes in."""

from __future__ import annotations

from lora_api.training import Precision, TrainPrecision


def choose_precision(asked: TrainPrecision, device: str, *, bf16: bool) -> tuple[Precision, str]:
    """The number format of base model and forward pass, and why.

    fp32 is for CPUs, whose half-precision arithmetic is slow where it exists. bf16 has the range of fp32, so that losses
    need no scaling; GPUs before 2020 compute it in software, if at all, and take fp16 instead, with a scaled loss.

    Args:
        asked: `train.dtype`.
        device: Kind of device: cuda or cpu.
        bf16: Whether the device computes in bf16.
    """
    if asked != TrainPrecision.AUTO:
        return Precision(asked.value), "train.dtype asks for it"
    if device != "cuda":
        return Precision.FP32, "there is no GPU"
    if bf16:
        return Precision.BF16, "the GPU computes in it, and it has the range of fp32"
    return Precision.FP16, "the GPU does not compute in bf16; the loss is scaled"
