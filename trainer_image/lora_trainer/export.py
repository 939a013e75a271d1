"""The final weights as files, and the loader that checks that a pipeline got all of them.

Several key layouts load without an error and without any effect, so loading here always ends in a comparison of what
the file holds with what each component of the pipeline got.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lora_trainer.export_layouts import ALPHA, AdapterFile, files_of
from lora_trainer.families.base import BaseModel
from lora_trainer.families.parts import CLIP_LEAD
from lora_trainer.networks import Adapter, FullFineTune, Trainable, installed_adapter
from lora_trainer.tensorfile import with_header

FOREIGN_PREFIXES = ("transformer.", "diffusion_model.", "base_model.model.", "unet.")
TEXT_PARTS = ("text_encoder", "text_encoder_2")
RESERVED = {"format", "lora_adapter_metadata", "sshs_model_hash"}
WEIGHTS_BIN = "adapter_weights.bin"


def export_final(
    model: BaseModel,
    trained: Trainable,
    folder: Path,
    *,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    formats: Sequence[str] = ("diffusers",),
    weights_bin: bool = False,
) -> Path:
    """As `export_files`; the main file, the first."""
    return export_files(
        model, trained, folder, dtype=dtype, metadata=metadata, formats=formats, weights_bin=weights_bin
    )[0]


def export_files(
    model: BaseModel,
    trained: Trainable,
    folder: Path,
    *,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    formats: Sequence[str] = ("diffusers",),
    weights_bin: bool = False,
) -> list[Path]:
    """Writes what was trained into `folder`, each file whole or not at all.

    Adapters are written in every layout of `formats` (see `export_layouts`); `adapter.safetensors` is that of
    diffusers. A denoiser that was trained whole is written as the component of a diffusers pipeline that it is, `transformer/` or `unet/`. The
    number format is changed last, and nothing is written unless every number is finite in it.

    Args:
        model: The base model that holds what was trained.
        trained: What was trained.
        folder: Created when it is missing.
        dtype: Number format of the files.
        metadata: Text that goes into the files' headers.
        formats: Entries of `save.formats`.
        weights_bin: Whether to write the tensors of the first format once more, for `torch.load`.

    Returns:
        The files, those of the first format first.

    Raises:
        ValueError: A weight is not finite, or not any more in `dtype`; or `metadata` uses a reserved name.
    """
    if reserved := RESERVED & metadata.keys():
        raise ValueError(f"metadata: {', '.join(sorted(reserved))} is written by the export itself")
    with model.plain_weights():
        files = _files(model, trained, formats)
    for file in files:
        file.tensors = {key: _cast(key, tensor, dtype) for key, tensor in file.tensors.items()}
    for file in files:
        data = with_header(file.tensors, {**metadata, **file.header})
        _write(folder / file.name, data)
        for name, text in file.texts.items():
            _write(folder / name, text.encode())
    if weights_bin:
        buffer = io.BytesIO()
        first = files[: len(_files(model, trained, formats[:1]))]
        torch.save({key: tensor for file in first for key, tensor in file.tensors.items()}, buffer)
        _write(folder / WEIGHTS_BIN, buffer.getvalue())
    return [folder / file.name for file in files]


def _files(model: BaseModel, trained: Trainable, formats: Sequence[str]) -> list[AdapterFile]:
    if isinstance(trained, FullFineTune):
        (part,) = trained.parts
        name = f"{part.name}/diffusion_pytorch_model.safetensors"
        config = {f"{part.name}/config.json": part.module.to_json_string()}  # type: ignore[operator]
        return [AdapterFile(name, trained.whole_state_dict(), {"format": "pt"}, texts=config)]
    assert isinstance(trained, Adapter)
    return [file for form in formats for file in files_of(model, trained, form)]


def portable_files(model: BaseModel, trained: Trainable) -> dict[str, bytes]:
    """Files for a checkpoint whose adapter no other program can read as it is saved: diffusers' own, in fp32."""
    if not isinstance(trained, Adapter) or "lora_adapter_metadata" in trained.checkpoint_header():
        return {}
    files = files_of(model, trained, "diffusers")
    return {file.name.replace("adapter", "portable", 1): with_header(file.tensors, file.header) for file in files}


def _cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    keeps = key.endswith(f".{ALPHA}") or not tensor.is_floating_point()
    result = tensor.detach().cpu().to(tensor.dtype if keeps else dtype).contiguous()
    if not torch.isfinite(result).all():
        why = f"does not fit into {dtype}" if torch.isfinite(tensor).all() else "is not finite"
        raise ValueError(
            f"adapter weight {key} {why} (largest magnitude {tensor.abs().max().item():g}); nothing was written"
        )
    return result


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    try:
        with Path(scratch).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def load_into_pipeline(pipe: Any, file: Path, *, name: str = "adapter", component: str | None = None) -> int:
    """Loads an adapter file into a diffusers pipeline and makes sure that all of it arrived.

    Args:
        pipe: A pipeline of the adapter's base model.
        file: What `export_final` wrote, or another program's file with diffusers' layer names.
        name: The adapter's name in the pipeline.
        component: The denoiser that it is for, where a pipeline has two.

    Returns:
        The number of layers that hold the adapter now.

    Raises:
        ValueError: The pipeline refused the file, or took nothing, a part, or other values of it; the pipeline is
            without that adapter then.
    """
    component = component or ("unet" if hasattr(pipe, "unet") else "transformer")
    with safe_open(str(file), framework="pt") as reader:
        tensors = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 not a mapping
    expected = {part: _of_part(tensors, part, component) for part in (component, *TEXT_PARTS)}
    try:
        _load(pipe, file, name, component, lokr=any(".lokr_" in key for key in tensors))
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: the {type(pipe).__name__} refuses the adapter: {error}") from error
    problem = next(_differences(pipe, name, expected), None) if tensors else "the file holds no adapter"
    if problem is not None:
        if any(installed_adapter(module, name).modules for module in _modules(pipe)):
            pipe.delete_adapters(name)
        raise ValueError(f"{file}: {problem}")
    return sum(len({_module(key) for key in of_part}) for of_part in expected.values())


def _load(pipe: Any, file: Path, name: str, component: str, *, lokr: bool) -> None:
    """Through the pipeline's own loader; LoKr straight into the denoiser where that knows LoRA only."""
    into = {"load_into_transformer_2": True} if component == "transformer_2" else {}
    try:
        pipe.load_lora_weights(str(file), adapter_name=name, **into)
    except ValueError:
        denoiser = getattr(pipe, component)
        if not lokr or installed_adapter(denoiser, name).modules:
            raise
        prefix = component.removesuffix("_2")
        denoiser.load_lora_adapter(str(file.parent), weight_name=file.name, prefix=prefix, adapter_name=name)


def load_all_into_pipeline(pipe: Any, files: Sequence[Path], *, name: str = "adapter") -> int:
    """Loads several files of one job, those of its kinds of adapters, and switches all of them on.

    Returns:
        The number of layers that hold an adapter now.

    Raises:
        ValueError: As `load_into_pipeline`.
    """
    names = [f"{name}-{number}" for number in range(len(files))]
    count = sum(load_into_pipeline(pipe, file, name=each) for file, each in zip(files, names, strict=True))
    pipe.set_adapters(names)
    return count


def _modules(pipe: Any) -> Iterator[torch.nn.Module]:
    yield from (part for part in pipe.components.values() if isinstance(part, torch.nn.Module))


def _of_part(tensors: dict[str, Tensor], part: str, component: str) -> dict[str, Tensor]:
    """What a file holds for one component, under that component's own names."""
    owner = {key: next((text for text in TEXT_PARTS if key.startswith(f"{text}.")), component) for key in tensors}
    mine = {key: tensor for key, tensor in tensors.items() if owner[key] == part}
    if part == component:
        return {_strip(key): tensor for key, tensor in mine.items()}
    return {key.removeprefix(f"{part}."): tensor for key, tensor in mine.items()}


def _differences(pipe: Any, name: str, expected: dict[str, dict[str, Tensor]]) -> Iterator[str]:
    for part, tensors in expected.items():
        module = getattr(pipe, part, None)
        if not isinstance(module, torch.nn.Module):
            if tensors:
                yield f"the file holds an adapter for {part}, which the pipeline has not loaded"
            continue
        surplus = "" if hasattr(module, CLIP_LEAD.removesuffix(".")) else CLIP_LEAD
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
