"""Layer names of the model as it was first published: what ComfyUI and kohya's tools call a layer.

The original code often has one layer where diffusers has several, its outputs being theirs one below the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Ends = Mapping[str, "str | tuple[str, int, int]"]

JOINT_ATTENTION: Ends = {
    "attn.to_q": ("img_attn.qkv", 0, 3),
    "attn.to_k": ("img_attn.qkv", 1, 3),
    "attn.to_v": ("img_attn.qkv", 2, 3),
    "attn.add_q_proj": ("txt_attn.qkv", 0, 3),
    "attn.add_k_proj": ("txt_attn.qkv", 1, 3),
    "attn.add_v_proj": ("txt_attn.qkv", 2, 3),
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
"""Attention of the double-stream blocks of FLUX.1 and FLUX.2, as a table for `renamed`."""


@dataclass(frozen=True)
class Original:
    """Where a layer's weight lies in the original model.

    Attributes:
        name: Full dotted name of the original layer.
        part: Which of its parts, from 0, in the order of their outputs.
        parts: How many layers it was split into.
    """

    name: str
    part: int = 0
    parts: int = 1


def renamed(layer: str, starts: Mapping[str, str], ends: Ends) -> Original:
    """The original of a layer, from tables of how names begin and end.

    Args:
        layer: Full dotted name in diffusers.
        starts: Beginning in diffusers to beginning in the original.
        ends: What follows the block's number in diffusers, to the same in the original, with part and parts if split.
    """
    for start, original_start in starts.items():
        number, _, end = layer.removeprefix(start).partition(".")
        if layer.startswith(start) and number.isdigit() and end in ends:
            found = ends[end]
            name, part, parts = found if isinstance(found, tuple) else (found, 0, 1)
            return Original(f"{original_start}{number}.{name}", part, parts)
    return Original(layer)


def grouped(layers: Iterable[str], originals: Mapping[str, Original]) -> dict[str, list[str]]:
    """Original layer names, each with those of `originals` it consists of, for all that hold one of `layers`."""
    wanted = {originals[layer].name for layer in layers}
    groups: dict[str, list[str]] = {}
    for layer, original in sorted(originals.items(), key=lambda item: (item[1].name, item[1].part)):
        if original.name in wanted:
            groups.setdefault(original.name, []).append(layer)
    return groups
