"""What a forward pass keeps for the backward pass, in bytes: an estimate from the layers and the tokens they see.

Every layer keeps about what goes in and what comes out, and the operations between the layers (norms, gates, attention)
keep copies of the same. So the bytes of a block are

    K x bytes x sum over its layers of tokens x (inputs + outputs)

with K by family: it was measured, by counting the tensors that autograd saved, with LoRA on all layers of blocks 512
wide and 1,024 picture tokens. Attention itself keeps no square of the tokens (the fused kernels recompute it).
Gradient checkpointing keeps the input of each block, and one block at a time whole.

References:
    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4 (the same sum for
    one kind of block). `tests/trainer/test_memory_activations.py` counts the saved tensors of every family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lora_api.archs import FRAME_STEP, UNET_ARCHS, VIDEO_ARCHS, Arch
from lora_api.memory.shapes import Component
from lora_api.memory.trained import layers_of

ERROR = 0.35
"""Relative error of activations that is to be expected."""

_HALF, _FULL = 1.6, 1.3
_K: Mapping[str, tuple[float, float]] = {
    Arch.ZIMAGE: (2.3, 1.45),
    Arch.ZIMAGE_TURBO: (2.3, 1.45),
    Arch.QWEN_IMAGE: (1.45, 1.05),
    Arch.WAN21: (1.6, 1.05),
    Arch.WAN22: (1.6, 1.05),
    Arch.SD15: (1.2, 1.2),
    Arch.SDXL: (1.2, 1.2),
}
"""K of the formula, with numbers of two bytes and of four: half-precision blocks keep some things in fp32."""

_TEXT_TOKENS: Mapping[str, int] = {
    Arch.SD15: 77,
    Arch.SDXL: 77,
    Arch.ZIMAGE: 128,
    Arch.ZIMAGE_TURBO: 128,
    Arch.QWEN_IMAGE: 128,
}
"""Families that pad captions see 512; of the others a usual caption is taken."""
_PADDED_TEXT_TOKENS = 512

_PATCH_PIXELS, _LATENT_PIXELS = 16, 8
_MODULATIONS = ("norm.linear", "norm1.linear", "norm1_context.linear", "_mod.", "adaLN_modulation", "time_emb_proj")
_OF_TEXT = (
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "ff_context",
    "txt_mlp",
    "attn2.to_k",
    "attn2.to_v",
    "context_refiner",
)
_OF_BOTH = ("single_transformer_blocks.", "layers.")
_UNET_LEVEL = re.compile(r"(down|up)_blocks\.(\d+)\.")
_UNET_BLOCK = re.compile(r"(?:down|up)_blocks\.\d+\.\w+\.\d+|mid_block\.\w+\.\d+")
_BLOCK = re.compile(r"\w+\.\d+")


@dataclass(frozen=True)
class Batch:
    """What one forward pass sees.

    Attributes:
        size: Samples.
        pixels: On the side of a square of the picture's area.
        frames: Of a clip; 1 for pictures.
    """

    size: int
    pixels: int
    frames: int = 1

    @property
    def latent_frames(self) -> int:
        """Frames after the VAE."""
        return 1 + (self.frames - 1) // FRAME_STEP

    def tokens(self, level: int | None = None) -> int:
        """Places in the latents of one sample: patches, or those of a UNet's level."""
        side = self.pixels / (_PATCH_PIXELS if level is None else _LATENT_PIXELS << level)
        return max(1, round(side * side)) * self.latent_frames


@dataclass(frozen=True)
class Kept:
    """What one block keeps, in bytes.

    Attributes:
        whole: With everything that its backward pass needs.
        entry: Its input alone.
    """

    whole: float
    entry: float


def activation_bytes(arch: str, denoiser: Component, batch: Batch, *, item_bytes: int, every: int | None) -> int:
    """The most that is kept at one time.

    Args:
        arch: `model.arch`.
        denoiser: One of them: experts take turns, and each keeps for its own samples.
        batch: What goes in.
        item_bytes: Of a number of the forward pass.
        every: Gradient checkpointing of every n-th block, 1 of all; None: off.
    """
    blocks = _blocks(arch, denoiser, batch, item_bytes)
    if not blocks:
        return 0
    if every is None:
        return round(sum(block.whole for block in blocks))
    entries = sum(block.entry for number, block in enumerate(blocks) if number % every == 0)
    wholes = sum(block.whole for number, block in enumerate(blocks) if number % every)
    return round(entries + wholes + max(block.whole for block in blocks))


def _blocks(arch: str, denoiser: Component, batch: Batch, item_bytes: int) -> list[Kept]:
    pattern = _UNET_BLOCK if arch in UNET_ARCHS else _BLOCK
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, sizes in layers_of(denoiser):
        if found := pattern.match(name):
            layers.setdefault(found[0], []).append((name, sizes))
    half, full = _K.get(arch, (_HALF, _FULL))
    factor = (half if item_bytes == 2 else full) * item_bytes * batch.size
    levels = _levels(denoiser) if arch in UNET_ARCHS else None
    return [_kept(arch, block, batch, factor, item_bytes=item_bytes, levels=levels) for block in layers.values()]


def _kept(
    arch: str,
    layers: Iterable[tuple[str, tuple[int, ...]]],
    batch: Batch,
    factor: float,
    *,
    item_bytes: int,
    levels: int | None,
) -> Kept:
    total, entry = 0.0, 0.0
    for name, sizes in layers:
        tokens = _tokens(arch, name, batch, levels)
        total += tokens * (sizes[0] + sizes[1])
        entry = max(entry, tokens * min(sizes[0], sizes[1]))
    both = 2 if arch not in UNET_ARCHS | VIDEO_ARCHS else 1  # two streams, or one of both lengths
    return Kept(total * factor, entry * both * item_bytes * batch.size)


def _tokens(arch: str, layer: str, batch: Batch, levels: int | None) -> int:
    text = _TEXT_TOKENS.get(arch, _PADDED_TEXT_TOKENS)
    if any(part in layer for part in _MODULATIONS):
        return 1
    if any(part in layer for part in _OF_TEXT):
        return text
    if levels is not None:
        return batch.tokens(_level(layer, levels))
    return batch.tokens() + (text if layer.startswith(_OF_BOTH) else 0)


def _levels(denoiser: Component) -> int:
    found = [int(match[2]) for name in denoiser if (match := _UNET_LEVEL.match(name))]
    return 1 + max(found, default=0)


def _level(layer: str, levels: int) -> int:
    """How often the latents were halved where a layer of a UNet is."""
    match = _UNET_LEVEL.match(layer)
    if match is None:
        return levels - 1
    number = int(match[2])
    return number if match[1] == "down" else levels - 1 - number
