"""The folder of a base model: what must be in it, how it is loaded, and which name its content has.

A base model is a folder of a diffusers pipeline: `model_index.json` and one folder per component. Nothing here reaches
the network, and weights are read from safetensors files only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WHOLE_FILE_BYTES = 64 * 2**20
"""Files up to this size are hashed whole; larger ones by their size and `PROBES` pieces."""

SINGLE_FILE_NAME = "single_file.safetensors"
"""In a component's folder, weights in any layout that diffusers can convert."""

PIECE_BYTES = 2**20
PROBES = 16


class ModelError(ValueError):
    """The folder does not hold the base model that was asked for; the message says what was found and expected."""


@dataclass(frozen=True)
class Layout:
    """What a family expects in a model folder.

    Attributes:
        pipelines: Accepted values of `_class_name` in `model_index.json`.
        weights: Components that are folders with safetensors weights.
        others: Components without weights (tokenizer, scheduler).
    """

    pipelines: tuple[str, ...]
    weights: tuple[str, ...] = ("transformer", "vae", "text_encoder")
    others: tuple[str, ...] = ("tokenizer", "scheduler")


def import_pipeline(folder: Path) -> None:
    """Imports the class of a folder's pipeline with all that stands behind it, which takes seconds, ahead of loading it.

    What is wrong with the folder is for `check_folder` to say.
    """
    import diffusers

    try:
        name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    getattr(diffusers, str(name), None)


def check_folder(folder: Path, arch: str, layout: Layout) -> dict[str, Any]:
    """The content of `model_index.json`, after checking that the folder holds what the family needs.

    Args:
        folder: Folder of a diffusers pipeline.
        arch: `model.arch` of the job, for the messages.
        layout: What the family expects.

    Raises:
        ModelError: The folder or its index is missing or unreadable, the index names another pipeline class, or a
            component or its weights are missing.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ModelError(f"model folder {folder}: found {found}, expected the folder of a diffusers pipeline ({arch})")
    index = _read_index(folder)
    name = index.get("_class_name")
    if name not in layout.pipelines:
        raise ModelError(
            f"model folder {folder}: model_index.json names the pipeline {name!r}, but model.arch {arch} expects "
            f"{' or '.join(layout.pipelines)}; set model.arch to the family of this model or point to another folder"
        )
    for component in (*layout.weights, *layout.others):
        part = folder / component
        if component not in index or not part.is_dir():
            present = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
            raise ModelError(
                f"model folder {folder}: component {component!r} is missing; found {', '.join(present) or 'no folders'}, "
                f"expected {', '.join((*layout.weights, *layout.others))}"
            )
        if component in layout.weights and not any(part.glob("*.safetensors")):
            files = sorted(entry.name for entry in part.iterdir())
            raise ModelError(
                f"model folder {part}: found {', '.join(files) or 'no files'}, expected weights in *.safetensors"
            )
    return index


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())[:20]
        raise ModelError(
            f"model folder {folder}: found {', '.join(names) or 'no files'}, expected model_index.json of a diffusers pipeline"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(index, dict):
        raise ModelError(f"{path}: found a {type(index).__name__}, expected an object with _class_name")
    return index


def content_identity(*parts: Path, salt: str) -> str:
    """Thirty-two hex digits that name the content of folders, wherever they lie: the model's part of a cache key.

    Every file counts by its relative name, its size and its bytes. Of files above 64 MiB the bytes are those of the
    first and last MiB (safetensors headers are in the first) and of 16 pieces spread evenly between, so that naming a
    model of many gigabytes takes well under a second.

    Args:
        parts: Folders, in an order that matters.
        salt: Whatever else decides what is computed from them: number formats, lengths, the version of a formula.
    """
    digest = hashlib.sha256(salt.encode())
    for part in parts:
        for path in sorted(entry for entry in part.rglob("*") if entry.is_file() and not entry.name.startswith(".")):
            size_bytes = path.stat().st_size
            digest.update(f"\0{part.name}/{path.relative_to(part).as_posix()}\0{size_bytes}\0".encode())
            _digest_file(digest, path, size_bytes)
    return digest.hexdigest()[:32]


def _digest_file(digest: Any, path: Path, size_bytes: int) -> None:
    with path.open("rb") as file:
        if size_bytes <= WHOLE_FILE_BYTES:
            while block := file.read(PIECE_BYTES):
                digest.update(block)
            return
        span = size_bytes - PIECE_BYTES
        for probe in range(PROBES + 2):
            file.seek(span * probe // (PROBES + 1))
            digest.update(file.read(PIECE_BYTES))


def hide_progress_bars() -> None:
    """Keeps the libraries' own progress bars out of the trainer's log."""
    from diffusers.utils import logging as diffusers_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


def load_part(folder: Path, cls: Any, part: str, **options: Any) -> Any:
    """One component (or, with an empty `part`, the whole pipeline) of a model folder, from local files only.

    Raises:
        ModelError: The library could not read it; the message quotes why.
    """
    from safetensors import SafetensorError

    hide_progress_bars()
    path = folder / part if part else folder
    try:
        return cls.from_pretrained(str(path), local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model folder {path}: {cls.__name__} could not be loaded: {error}") from error


def load_single_files(folder: Path, *, dtype: torch.dtype) -> dict[str, Any]:
    """The components of a model folder whose weights are a single file, by name; most folders have none.

    Raises:
        ModelError: diffusers could not read the file as that component, or it lacks weights.
    """
    found = [path.parent for path in sorted(folder.glob(f"*/{SINGLE_FILE_NAME}"))]
    return {part.name: _load_single_file(folder, part, dtype) for part in found}


def _load_single_file(folder: Path, part: Path, dtype: torch.dtype) -> Any:
    import diffusers

    name = _read_index(folder)[part.name][1]
    file = (part / SINGLE_FILE_NAME).resolve()
    options = {"config": str(folder), "subfolder": part.name, "torch_dtype": dtype, "local_files_only": True}
    try:
        component = getattr(diffusers, name).from_single_file(str(file), **options)
    except NotImplementedError as error:  # a weight that stayed without data is converted
        raise ModelError(f"model file {file}: lacks weights of {name}; expected all of the denoiser") from error
    except Exception as error:  # the library raises what its conversion stumbles over
        raise ModelError(f"model file {file}: not readable as {name}: {type(error).__name__}: {error}") from error
    if lacking := sorted(key for key, value in component.state_dict().items() if value.is_meta):
        raise ModelError(
            f"model file {file}: lacks {len(lacking)} of the weights of {name}, among them {', '.join(lacking[:3])}"
        )
    return component
