"""Keys of the model block that save memory: the number formats in which frozen weights are kept."""

from __future__ import annotations

from typing import Any

from lora_api.aitoolkit.findings import Block
from lora_api.wording import short

_DEFAULT = "qfloat8"
_FORMATS = {
    "qfloat8": "fp8",
    "float8": "fp8",
    "fp8": "fp8",
    "qint8": "int8",
    "int8": "int8",
    "uint8": "int8",
    "nf4": "nf4",
}
_FEW_BITS = ("uint7", "uint6", "uint5", "uint4", "int4", "qint4", "uint3", "uint2", "qint2")


def read_quantisation(block: Block) -> None:
    """`quantize` and `quantize_te`, which is as `quantize` where it is left out, with the formats of `qtype` and `qtype_te`."""
    base, qtype = block.take("quantize"), block.take("qtype")
    texts, qtype_te = block.take("quantize_te"), block.take("qtype_te")
    texts = base if texts is None else texts
    for name, wanted, kind in (("quantize", base, qtype), ("quantize_te", texts, qtype_te)):
        if wanted not in (None, False):
            named = wanted if isinstance(wanted, str) else _DEFAULT  # the format itself, as it is written here
            _take(block, name, kind or named)


def read_offload(block: Block) -> None:
    """`layer_offloading` with its share of the transformer; text encoders are let go here anyway."""
    wanted, share = block.take("layer_offloading"), block.take("layer_offloading_transformer_percent")
    block.take("layer_offloading_text_encoder_percent")
    if wanted:
        block.out["offload_blocks"] = 1.0 if share is None else share


def read_compile(block: Block) -> bool:
    """Whether any of the keys asks for compiled blocks."""
    whole, blocks = block.take("compile"), block.take("block_compile")
    return bool(whole or blocks)


def _take(block: Block, name: str, kind: Any) -> None:
    key = name.replace("quantize", "qtype")
    plain, bar, _ = str(kind).partition("|")
    if bar:
        block.note(f"ignored: the adapter in model.{key}: {short(kind)} (it makes up for few bits there)")
    if plain in _FORMATS:
        block.out[name] = _FORMATS[plain]
    elif plain in _FEW_BITS:
        block.out[name] = "nf4"
        block.note(f"model.{name}: {plain} is nf4 here, four bits with levels made for weights")
    else:
        block.problem(
            key, f"{short(plain)} has no counterpart here; expected one of {', '.join((*_FORMATS, *_FEW_BITS))}"
        )
