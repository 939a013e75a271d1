"""A training adapter: a LoRA that is part of the base model while an adapter is trained, and not when it is used.

A distilled model loses its few-step ability when it is trained on as it is. A training adapter undoes the distillation:
merged into the weights, the model trains like an undistilled one, and what was learned works on the plain distilled
model. Both sets of weights are exact: plain weights are kept on the CPU as they were, merged ones are computed from
them each time, so that no number of changes wears them down. Where the base model is quantised after the merge, either set is
quantised anew from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lora_trainer.memory.quantised import put_weight

NAME = "assistant"
_DOWN = (".lora_A.weight", ".lora_down.weight", ".lora.down.weight")


@dataclass(frozen=True)
class _Change:
    """One weight: W and W + scale B A."""

    layer: nn.Module
    plain: Tensor  # on the CPU, in the weight's own format
    down: Tensor  # (r, in)
    up: Tensor  # (out, r), with alpha / rank

    @torch.no_grad()
    def merge(self) -> None:
        device = _device(self.layer)
        delta = self.up.to(device) @ self.down.to(device)
        merged = self.plain.to(device).float() + delta.view(self.plain.shape)
        put_weight(self.layer, merged.to(self.plain.dtype))

    @torch.no_grad()
    def restore(self) -> None:
        put_weight(self.layer, self.plain.to(_device(self.layer)))


class Assistant:
    """A training adapter in the weights of a denoiser."""

    def __init__(self, changes: list[_Change]) -> None:
        self._changes = changes
        for change in changes:
            change.merge()

    @property
    def module_count(self) -> int:
        """Number of layers that it changes."""
        return len(self._changes)

    @contextlib.contextmanager
    def taken_out(self) -> Iterator[None]:
        """The plain model inside, to the bit; afterwards the one that is trained, again to the bit."""
        for change in self._changes:
            change.restore()
        try:
            yield
        finally:
            for change in self._changes:
                change.merge()


def merge_assistant(pipe: Any, file: Path) -> Assistant:
    """Merges a LoRA file, in any layout that the pipeline reads, into its denoiser at full strength.

    Args:
        pipe: A pipeline without adapters.
        file: The safetensors file.

    Raises:
        ValueError: The file can't be read, is no LoRA for this model, only a part of it is, or it changes nothing; the weights are
            plain then.
    """
    from peft.tuners.lora import LoraLayer

    expected = _layers_in(file)
    try:
        pipe.load_lora_weights(str(file), adapter_name=NAME)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{file}: the {type(pipe).__name__} refuses it: {error}") from error
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    layers = [m for m in denoiser.modules() if isinstance(m, LoraLayer) and NAME in m.lora_A]
    changes = [_change(layer) for layer in layers]
    pipe.unload_lora_weights()
    if not changes or len(changes) < expected:
        raise ValueError(
            f"{file}: holds a LoRA for {expected} layers, and {type(denoiser).__name__} took {len(changes)} of them"
        )
    if not any(change.up.any() and change.down.any() for change in changes):
        raise ValueError(f"{file}: changes nothing, all {len(changes)} layers of its LoRA are zero")
    return Assistant(changes)


def _device(layer: nn.Module) -> torch.device:
    return next(tensor.device for tensors in (layer.buffers(), layer.parameters()) for tensor in tensors)


def _change(layer: Any) -> _Change:
    base = layer.get_base_layer()
    down, up = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
    return _Change(
        layer=base,
        plain=base.weight.detach().to("cpu", copy=True),
        down=down.float().flatten(1).cpu(),
        up=(up.float().flatten(1) * float(layer.scaling[NAME])).cpu(),
    )


def _layers_in(file: Path) -> int:
    try:
        with safe_open(str(file), framework="pt") as reader:
            return sum(key.endswith(_DOWN) for key in reader.keys())  # noqa: SIM118 not a mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: not readable as safetensors: {error}") from error
