"""Frozen linear layers whose weights are kept in eight or four bits.

The weight is turned back into the format of the input for each product, forward and backward, and forgotten; only codes
and scales stay. W is (m, n):

- int8: W ~ s Q, Q integers from -127 to 127, a scale s for each of the m outputs.
- fp8: the same with Q in e4m3 (4 bits of exponent, 3 of mantissa), whose largest number is 448.
- nf4: the 16 quantiles of a normal distribution, a scale for every 64 weights.

A layer is changed where it stands and stays the same object: adapters around it, hooks and a training adapter keep hold of
it. Codes and scales are buffers, so moving a model moves them; codes are never of a float type, so nothing casts them.

References:
    Dettmers et al. 2022, "LLM.int8()", section 2.1 (absmax, by rows). Micikevicius et al. 2022, "FP8 Formats for Deep
    Learning", section 3. Dettmers et al. 2023, "QLoRA", section 3 (nf4, through bitsandbytes). Checked in
    tests/trainer/test_quantised.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lora_api.memory.estimate import NF4_BLOCK

Format = Literal["int8", "fp8", "nf4"]

_INT8_MAX, _FP8_MAX = 127.0, 448.0
_FP8 = torch.float8_e4m3fn


class QuantisedLinear(nn.Linear):
    """A frozen `nn.Linear` with quantised weights; made from one by `quantise_layer`."""

    format: Format
    codes: Tensor  # (m, n) int8, or bytes
    scale: Tensor  # (m, 1) in the layer's own format, or (blocks,) fp32
    _dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight that the codes stand for, in the format that it had."""
        return dequantised(self.codes, self.scale, self.format, (self.out_features, self.in_features), self._dtype)

    def put(self, weight: Tensor) -> None:
        """Quantises another weight into this layer: the same weight always gives the same codes."""
        codes, scale = quantised(weight.detach().to(self.codes.device, self._dtype), self.format)
        self.codes.copy_(codes)
        self.scale.copy_(scale)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 as torch.nn.Linear.forward
        """W x + b, in the format of autocast or of the input."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))  # noqa: A001 as above
        output: Tensor = _Product.apply(input, self.codes, self.scale, self.format, self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        """As other layers, with the format."""
        return f"{super().extra_repr()}, format={self.format}"


class _Product(torch.autograd.Function):
    """W x, with a gradient for x; keeps codes and scales for the backward pass, not the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, kind: Format, outputs: int) -> Tensor:  # noqa: PLR0917 torch passes them so
        ctx.save_for_backward(codes, scale)
        ctx.kind, ctx.shape = kind, (outputs, x.shape[-1])
        return linear(x, dequantised(codes, scale, kind, ctx.shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        weight_mn = dequantised(codes, scale, ctx.kind, ctx.shape, gradient.dtype)
        return gradient @ weight_mn, None, None, None, None


def quantised(weight_mn: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight, on its device."""
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(weight_mn.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
        return codes, state.absmax
    largest = _INT8_MAX if kind == "int8" else _FP8_MAX
    peak_m1 = weight_mn.float().abs().amax(dim=1, keepdim=True)
    # rounded to the layer's format before it is used, so that codes make up for what rounding changes
    scale_m1 = (peak_m1 / largest).clamp(min=torch.finfo(torch.float32).tiny).to(weight_mn.dtype)
    scale_m1 = torch.where(scale_m1 == 0, torch.ones_like(scale_m1), scale_m1)
    scaled_mn = (weight_mn.float() / scale_m1.float()).clamp(-largest, largest)
    codes_mn = scaled_mn.round().to(torch.int8) if kind == "int8" else scaled_mn.to(_FP8).view(torch.uint8)
    return codes_mn, scale_m1


def dequantised(codes: Tensor, scale: Tensor, kind: Format, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight (m, n) in `dtype`."""
    if kind == "nf4":
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState(
            absmax=scale, shape=torch.Size(shape), code=_nf4_levels(codes.device), blocksize=NF4_BLOCK, quant_type="nf4",
            dtype=dtype,
        )  # fmt: skip
        weight_mn: Tensor = dequantize_4bit(codes, quant_state=state).reshape(shape)
        return weight_mn
    plain_mn = codes if kind == "int8" else codes.view(_FP8)
    return plain_mn.to(dtype) * scale.to(dtype)  # codes are exact in every format, so this rounds once


_LEVELS: dict[torch.device, Tensor] = {}


def _nf4_levels(device: torch.device) -> Tensor:
    if device not in _LEVELS:
        from bitsandbytes.functional import get_4bit_type

        _LEVELS[device] = get_4bit_type("nf4", device=device)
    return _LEVELS[device]


@torch.no_grad()
def quantise_layer(layer: nn.Linear, kind: Format, device: torch.device) -> None:
    """Quantises a frozen layer in place, its weight passing through `device` alone; everything of it is there afterwards.

    Raises:
        ValueError: The weight is not finite.
    """
    weight_mn, bias = layer.weight.detach().to(device), layer.bias
    if not torch.isfinite(weight_mn).all():
        raise ValueError("a weight of the base model is not finite")
    codes, scale = quantised(weight_mn, kind)
    del layer.weight
    layer.__class__ = QuantisedLinear
    assert isinstance(layer, QuantisedLinear)
    layer.format, layer._dtype = kind, weight_mn.dtype  # noqa: SLF001 our own
    layer.register_buffer("codes", codes)
    layer.register_buffer("scale", scale)
    if bias is not None:
        bias.data = bias.data.to(device)


@torch.no_grad()
def put_weight(layer: nn.Module, weight: Tensor) -> None:
    """Gives a layer another weight, in the format in which it keeps it."""
    if isinstance(layer, QuantisedLinear):
        layer.put(weight)
    else:
        layer.weight.copy_(weight)  # type: ignore[operator]  # not .data, whose changes are not counted


def quantise_blocks(blocks: list[nn.Module], kind: Format, device: torch.device) -> int:
    """Quantises every linear layer of some blocks, in place; returns how many there were.

    Args:
        blocks: Frozen; without adapters yet.
        kind: The format.
        device: Where the layers are afterwards.
    """
    layers = [layer for block in blocks for layer in linear_layers(block)]
    for layer in layers:
        quantise_layer(layer, kind, device)
    return len(layers)


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """The plain linear layers inside a module."""
    return (layer for layer in module.modules() if type(layer) is nn.Linear)
