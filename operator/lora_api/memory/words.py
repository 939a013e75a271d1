"""The estimate in words: a small table, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator

from lora_api.config import TrainerConfig
from lora_api.memory.estimate import CONTEXT_GIB, GIB, MIB, Estimate, estimate_of, shapes_for
from lora_api.precision import choose_precision
from lora_api.training import Precision, TrainPrecision

_ROWS = (
    ("weights", "denoiser and VAE"),
    ("adapter", "what is trained, fp32"),
    ("gradients", "fp32"),
    ("optimizer", "state of {optimizer}"),
    ("activations", "kept for the backward pass"),
)


def estimate_lines(config: TrainerConfig, estimate: Estimate) -> list[str]:
    """A row for each use of memory, then what is needed at once in each phase."""
    words = {"optimizer": config.train.optimizer}
    unit, name = (GIB, "GiB") if estimate.total >= GIB else (MIB, "MiB")

    def amount(size: int) -> str:
        return f"{size / unit:.1f} {name}"

    rows = [(use, getattr(estimate, use), what.format(**words)) for use, what in _ROWS]
    rows.append(("training", estimate.training, "the sum"))
    texts = f"denoiser, whole VAE, and text encoders of {amount(estimate.text_encoders)}, which are let go afterwards"
    rows.append(("caching", estimate.caching, texts))
    if estimate.sampling:
        rows.append(
            ("sampling", estimate.sampling, "without gradients and activations, with the VAE's decoder at work")
        )
    place = "of each process" if config.device == "cpu" else "on each GPU"
    head = f"memory {place}: about {amount(estimate.total)} (+- {estimate.error / unit:.1f}), from {estimate.source}"
    return [head, *(f"  {phase:<12}{size / unit:9.2f} {name}  {what}" for phase, size, what in rows)]


def does_not_fit(config: TrainerConfig, estimate: Estimate, available_gib: float) -> str | None:
    """What to say where a GPU is too small; None where it is large enough.

    Args:
        config: Of the run, for advice.
        estimate: Of the run.
        available_gib: Memory of the GPU.
    """
    needed = estimate.total / GIB + CONTEXT_GIB
    if needed <= available_gib:
        return None
    unsure = " It may just fit." if needed - estimate.error / GIB <= available_gib else ""
    advice = "; ".join(_advice(config, estimate)) or "a smaller model or a larger GPU"
    return (
        f"about {needed:.1f} GiB are needed, with what CUDA takes for itself, and the GPU has {available_gib:.1f}.{unsure} "
        f"What helps, the most first: {advice}"
    )


def _advice(config: TrainerConfig, estimate: Estimate) -> Iterator[str]:
    train = config.train
    if estimate.activations > estimate.training / 4:
        if not train.gradient_checkpointing:
            yield "train.gradient_checkpointing: true"
        elif train.batch_size > 1:
            yield "train.batch_size: 1, with more train.gradient_accumulation"
    if train.dtype == TrainPrecision.FP32:
        yield "train.dtype: bf16"
    if config.network.type == "full":
        yield "network.type: lora"
    elif config.model.quantize is None and estimate.weights > estimate.training / 4:
        yield "model.quantize: int8, or nf4 for less still"
    if config.network.type != "full" and not config.model.offload_blocks and not train.compile:
        yield "model.offload_blocks: 1"
    if len(config.datasets) and max(side for each in config.datasets for side in each.resolution) > 512:
        yield "a smaller resolution of the datasets"


def expected_precision(config: TrainerConfig) -> Precision:
    """The number format where the device is not known yet: that of current GPUs."""
    return choose_precision(config.train.dtype, "cpu" if config.device == "cpu" else "cuda", bf16=True)[0]


def report_for(config: TrainerConfig, available_gib: float | None, processes: int = 1) -> list[str]:
    """The table, and a warning where it does not fit; empty for families without a table whose model is elsewhere.

    Args:
        config: Of the run.
        available_gib: Memory of each GPU; None where it is not known.
        processes: Of the run, over all nodes.
    """
    shapes = shapes_for(config)
    if shapes is None:
        return []
    estimate = estimate_of(config, shapes, precision=expected_precision(config), processes=processes)
    warning = does_not_fit(config, estimate, available_gib) if available_gib is not None else None
    return estimate_lines(config, estimate) + ([f"warning: {warning}"] if warning else [])
