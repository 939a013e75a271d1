"""`--config FILE`: the configuration in whatever form a user has it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_api import aitoolkit
from lora_api.config import TrainerConfig
from lora_api.job import KIND
from lora_api.problems import InvalidDocument
from lora_api.yamlfile import Document, UnreadableError, read_documents
from lora_trainer.commandline.refusal import Refusal

_FOLDERS = {"name_or_path", "folder_path", "mask_path"}
_LOCATIONS = _FOLDERS | {"extras_name_or_path", "assistant_lora_path", "init_from"}


@dataclass(frozen=True)
class Source:
    """A configuration file as read; its types have yet to check it."""

    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    root: str = ""  # path of the configuration in the file, for problems
    output_dir: str | None = None  # where the file itself sends the run


def read_source(name: str, process: int | None, variables: Mapping[str, str]) -> Source:
    """The configuration in a file: our own blocks, a LoRATrainingJob, or an ai-toolkit file.

    Raises:
        Refusal: When it is none of these, or can't be converted.
    """
    try:
        documents = read_documents(name)
    except UnreadableError as error:
        raise Refusal(str(error)) from error
    jobs = [d for d in documents if isinstance(d.value, dict) and d.value.get("kind") == KIND]
    document = jobs[0] if len(jobs) == 1 else documents[0] if len(documents) == 1 else None
    if document is None or not isinstance(document.value, dict):
        raise Refusal(f"{name}: expected one configuration, found {len(documents)} documents with {len(jobs)} {KIND}s")
    if aitoolkit.is_ai_toolkit(document.value):
        return _from_ai_toolkit(document, process, variables)
    if process is not None:
        raise Refusal(f"--process: {name} is no ai-toolkit file and has no list of processes")
    return _from_job(document) if document.value.get("kind") == KIND else _from_blocks(document)


def _from_ai_toolkit(document: Document, process: int | None, variables: Mapping[str, str]) -> Source:
    """Relative folders are relative to the current folder, as there."""
    try:
        found = aitoolkit.convert(document.value, variables, process, lambda place: Path(place).exists())
    except InvalidDocument as error:
        lines = [
            f"{document.place}: {problem}".replace("by its number", "with --process") for problem in error.problems
        ]
        raise Refusal("\n".join(lines)) from error
    folder = str(Path(found.folder) / found.name) if found.folder else None
    return Source(found.config, found.notes, found.path, folder)


def _from_job(document: Document) -> Source:
    spec = document.value.get("spec")
    config = spec.get("config") if isinstance(spec, dict) else None
    if not isinstance(config, dict):
        raise Refusal(f"{document.place}: spec.config: is required, but missing")
    others = [name for name in spec if name != "config"]
    notes = (
        (f"ignored: spec.{', spec.'.join(others)} (without the operator only spec.config counts)",) if others else ()
    )
    return Source(with_folders_of(config, document.folder), notes, "spec.config")


def _from_blocks(document: Document) -> Source:
    known = set(TrainerConfig.model_fields)
    if not known & set(document.value):
        raise Refusal(
            f"{document.place}: is neither a configuration ({', '.join(sorted(known))}), nor a {KIND}, nor an ai-toolkit file"
        )
    return Source(with_folders_of(document.value, document.folder))


def with_folders_of(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with relative folders made absolute: they are relative to the file that names them."""
    config = copy.deepcopy(config)
    datasets = config.get("datasets")
    for block in (config.get("model"), config.get("network"), *(datasets if isinstance(datasets, list) else [])):
        for key in _LOCATIONS & set(block) if isinstance(block, dict) else ():
            place = block[key]
            if not isinstance(place, str) or "://" in place:
                continue
            absolute = os.path.normpath(folder / Path(place).expanduser())
            if key in _FOLDERS or Path(absolute).exists():  # other files may be names of something else
                block[key] = absolute
    return config
