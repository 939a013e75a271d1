"""The final adapter: one safetensors file that diffusers takes as it is, and the loader that checks it did.

Several key layouts load without an error and without any effect, so loading here always ends in a comparison of what
the file holds with what each component of the pipeline got.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lora_trainer.families.base import BaseModel
from lora_trainer.networks import CLIP_PREFIX, Adapter, installed_adapter

FILE_NAME = "adapter.safetensors"
FOREIGN_PREFIXES = ("transformer.", "diffusion_model.", "base_model.model.", "unet.")
TEXT_PARTS = ("text_encoder", "text_encoder_2")
RESERVED = {"format", "lora_adapter_metadata"}


def export_final(
    model: BaseModel, adapter: Adapter, folder: Path, *, dtype: torch.dtype, metadata: Mapping[str, str]
) -> Path:
    """Writes `adapter.safetensors` into `folder`, whole or not at all.

    Keys are `transformer.<layer>.lora_A.weight` (or `unet.`, `text_encoder.`; or `.lokr_w1` ...). The scale alpha / rank
    is folded into the weights, in fp32, and the adapter's configuration in the header says alpha = rank: programs that
    read it and programs that don't give the same pictures. (LoKr of convolutions can't be recognised from shapes alone:
    readers need the header.) The number format is changed last.

    Args:
        model: The base model that holds the adapter.
        adapter: What was trained.
        folder: Created when it is missing.
        dtype: Number format of the file.
        metadata: Text that goes into the file's header: base model, arch, rank, alpha, trigger word, steps, seed,
            versions.

    Returns:
        The file.

    Raises:
        ValueError: A weight is not finite, or not any more in `dtype`; or `metadata` uses a reserved name.
    """
    if reserved := RESERVED & metadata.keys():
        raise ValueError(f"metadata: {', '.join(sorted(reserved))} is written by the export itself")
    tensors = {key: _cast(key, tensor, dtype) for key, tensor in adapter.portable_state_dict().items()}
    header = {
        **metadata,
        "format": "pt",
        "lora_adapter_metadata": json.dumps(adapter.portable_config(), sort_keys=True),
        "denoiser_class": type(model.denoiser).__name__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return _write(tensors, folder / FILE_NAME, header)


def _cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    result = tensor.to(dtype).contiguous()
    if not torch.isfinite(result).all():
        why = f"does not fit into {dtype}" if torch.isfinite(tensor).all() else "is not finite"
        raise ValueError(
            f"adapter weight {key} {why} (largest magnitude {tensor.abs().max().item():g}); nothing was written"
        )
    return result


def _write(tensors: dict[str, Tensor], target: Path, header: dict[str, str]) -> Path:
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    try:
        with Path(scratch).open("wb") as file:
            file.write(_sorted_header(save(tensors, metadata=header)))
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return target


def _sorted_header(data: bytes) -> bytes:
    """The same safetensors file with its metadata in the order of names: the library's order differs at every call."""
    size_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size_bytes])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + size_bytes :]


def load_into_pipeline(pipe: Any, file: Path, *, name: str = "adapter") -> int:
    """Loads an adapter file into a diffusers pipeline and makes sure that all of it arrived.

    Args:
        pipe: A pipeline of the adapter's base model.
        file: What `export_final` wrote, or another program's file with diffusers' layer names.
        name: The adapter's name in the pipeline.

    Returns:
        The number of layers that hold the adapter now.

    Raises:
        ValueError: The pipeline refused the file, or took nothing, a part, or other values of it; the pipeline is
            without that adapter then.
    """
    with safe_open(str(file), framework="pt") as reader:
        tensors = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 not a mapping
    denoiser_part = "unet" if hasattr(pipe, "unet") else "transformer"
    expected = {part: _of_part(tensors, part, denoiser_part) for part in (denoiser_part, *TEXT_PARTS)}
    try:
        _load(pipe, file, name, denoiser_part, lokr=any(".lokr_" in key for key in tensors))
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: the {type(pipe).__name__} refuses the adapter: {error}") from error
    problem = next(_differences(pipe, name, expected), None) if tensors else "the file holds no adapter"
    if problem is not None:
        if any(installed_adapter(module, name).modules for module in _modules(pipe)):
            pipe.delete_adapters(name)
        raise ValueError(f"{file}: {problem}")
    return sum(len({_module(key) for key in of_part}) for of_part in expected.values())


def _load(pipe: Any, file: Path, name: str, denoiser_part: str, *, lokr: bool) -> None:
    """Through the pipeline's own loader; LoKr straight into the denoiser where that knows LoRA only."""
    try:
        pipe.load_lora_weights(str(file), adapter_name=name)
    except ValueError:
        denoiser = getattr(pipe, denoiser_part)
        if not lokr or installed_adapter(denoiser, name).modules:
            raise
        denoiser.load_lora_adapter(str(file.parent), weight_name=file.name, prefix=denoiser_part, adapter_name=name)


def _modules(pipe: Any) -> Iterator[torch.nn.Module]:
    yield from (part for part in pipe.components.values() if isinstance(part, torch.nn.Module))


def _of_part(tensors: dict[str, Tensor], part: str, denoiser_part: str) -> dict[str, Tensor]:
    """What a file holds for one component, under that component's own names."""
    owner = {key: next((text for text in TEXT_PARTS if key.startswith(f"{text}.")), denoiser_part) for key in tensors}
    mine = {key: tensor for key, tensor in tensors.items() if owner[key] == part}
    if part == denoiser_part:
        return {_strip(key): tensor for key, tensor in mine.items()}
    return {key.removeprefix(f"{part}."): tensor for key, tensor in mine.items()}


def _differences(pipe: Any, name: str, expected: dict[str, dict[str, Tensor]]) -> Iterator[str]:
    for part, tensors in expected.items():
        module = getattr(pipe, part, None)
        if not isinstance(module, torch.nn.Module):
            if tensors:
                yield f"the file holds an adapter for {part}, which the pipeline has not loaded"
            continue
        surplus = "" if hasattr(module, CLIP_PREFIX.removesuffix(".")) else CLIP_PREFIX
        difference = _difference(module, name, {key.removeprefix(surplus): tensors[key] for key in tensors})
        if difference is not None:
            yield difference


def _difference(module: torch.nn.Module, name: str, expected: dict[str, Tensor]) -> str | None:
    found = installed_adapter(module, name)
    wanted = {_module(key) for key in expected}
    if missing := sorted(wanted - found.modules):
        return (
            f"the file has adapters for {len(wanted)} layers, {type(module).__name__} took {len(found.modules)} of them; "
            f"without effect: {', '.join(missing[:3])}"
        )
    if extra := sorted(found.modules - wanted):
        return f"{len(extra)} layers got an adapter that the file does not hold: {', '.join(extra[:3])}"
    if unexpected := sorted(expected.keys() - found.tensors.keys()):
        return f"{len(unexpected)} keys were not used: {', '.join(unexpected[:3])}"
    for key, tensor in found.tensors.items():
        if key not in expected or not torch.equal(expected[key].to(tensor.device, tensor.dtype), tensor):
            return f"{key} does not have the file's values after loading"
    return None


def _strip(key: str) -> str:
    prefix = next((each for each in FOREIGN_PREFIXES if key.startswith(each)), "")
    return key.removeprefix(prefix)


def _module(key: str) -> str:
    for mark in (".lora_", ".lokr_", ".alpha"):
        head, found, _ = key.rpartition(mark)
        if found:
            return head
    return key
