"""The final adapter: one safetensors file that diffusers takes as it is, and the loader that checks it did.

Several key layouts load without an error and without any effect, so loading here always ends in a comparison of what
the file holds with what the denoiser got.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lora_trainer.families.base import BaseModel
from lora_trainer.networks import Adapter, installed_adapter

FILE_NAME = "adapter{part}.safetensors"
PREFIX = "transformer."
FOREIGN_PREFIXES = (PREFIX, "diffusion_model.", "base_model.model.", "unet.")
RESERVED = {"format", "lora_adapter_metadata"}


def export_final(
    model: BaseModel, adapter: Adapter, folder: Path, *, dtype: torch.dtype, metadata: Mapping[str, str]
) -> Path:
    """As `export_files`, for the one file of most families; of several the first."""
    return export_files(model, adapter, folder, dtype=dtype, metadata=metadata)[0]


def export_files(
    model: BaseModel, adapter: Adapter, folder: Path, *, dtype: torch.dtype, metadata: Mapping[str, str]
) -> list[Path]:
    """Writes `adapter.safetensors` into `folder`, whole or not at all; for two experts a file for each.

    Keys are `transformer.<layer>.lora_A.weight` (or `.lokr_w1` ...). The scale alpha / rank is folded into the weights,
    in fp32, and the adapter's configuration in the header says alpha = rank: programs that read it and programs that
    don't give the same pictures. The number format is changed last.

    Args:
        model: The base model that holds the adapter.
        adapter: What was trained.
        folder: Created when it is missing.
        dtype: Number format of the file.
        metadata: Text that goes into the file's header: base model, arch, rank, alpha, trigger word, steps, seed,
            versions.

    Returns:
        The files, in the order of the family's `export_parts`.

    Raises:
        ValueError: A weight is not finite, or not any more in `dtype`; or `metadata` uses a reserved name.
    """
    if reserved := RESERVED & metadata.keys():
        raise ValueError(f"metadata: {', '.join(sorted(reserved))} is written by the export itself")
    contents = {
        name: _content(adapter, f"{component}." if len(model.export_parts) > 1 else "", dtype)
        for name, component in model.export_parts.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, component in model.export_parts.items():
        tensors, config = contents[name]
        if not tensors:  # the layer filters left this expert as it was
            continue
        header = {
            **metadata,
            "format": "pt",
            "lora_adapter_metadata": json.dumps(config, sort_keys=True),
            "denoiser_class": type(getattr(model.pipe, component)).__name__,
        }
        files.append(_write(tensors, folder / FILE_NAME.format(part=name), header))
    return files


def _content(adapter: Adapter, part: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration of one file."""
    tensors = {f"{PREFIX}{key}": _cast(key, value, dtype) for key, value in adapter.portable_state_dict(part).items()}
    return tensors, {f"{PREFIX}{key}": value for key, value in adapter.portable_config(part).items()}


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


def load_into_pipeline(pipe: Any, file: Path, *, name: str = "adapter", component: str = "transformer") -> int:
    """Loads an adapter file into a diffusers pipeline and makes sure that all of it arrived.

    Args:
        pipe: A pipeline of the adapter's base model.
        file: What `export_final` wrote, or another program's file with diffusers' layer names.
        name: The adapter's name in the pipeline.
        component: The denoiser that it is for.

    Returns:
        The number of layers that hold the adapter now.

    Raises:
        ValueError: The pipeline refused the file, or took nothing, a part, or other values of it; the pipeline is
            without that adapter then.
    """
    with safe_open(str(file), framework="pt") as reader:
        expected = {_strip(key): reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 not a mapping
    denoiser = getattr(pipe, component)
    try:
        _load(pipe, file, expected, name, component)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{file}: the {type(pipe).__name__} refuses the adapter: {error}") from error
    problem = _difference(denoiser, name, expected)
    if problem is not None:
        if installed_adapter(denoiser, name).modules:
            denoiser.delete_adapters(name)
        raise ValueError(f"{file}: {problem}")
    return len({_module(key) for key in expected})


def _load(pipe: Any, file: Path, expected: Mapping[str, Tensor], name: str, component: str) -> None:
    """Most pipelines take LoRA only; their denoisers take LoKr as well."""
    takes_lokr = type(pipe).__name__.startswith(("Flux2", "ZImage"))
    if any(".lokr_" in key for key in expected) and not takes_lokr:
        getattr(pipe, component).load_lora_adapter(str(file), prefix=PREFIX.removesuffix("."), adapter_name=name)
        return
    into = {"load_into_transformer_2": True} if component == "transformer_2" else {}
    pipe.load_lora_weights(str(file), adapter_name=name, **into)


def _difference(denoiser: torch.nn.Module, name: str, expected: dict[str, Tensor]) -> str | None:
    found = installed_adapter(denoiser, name)
    wanted = {_module(key) for key in expected}
    if not wanted:
        return "the file holds no adapter"
    if missing := sorted(wanted - found.modules):
        return (
            f"the file has adapters for {len(wanted)} layers, {type(denoiser).__name__} took {len(found.modules)} of them; "
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
