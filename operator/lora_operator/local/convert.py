"""`lora-operator convert`: an ai-toolkit file as a LoRATrainingJob. Decides, prints nothing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from lora_api import aitoolkit
from lora_api.config import TrainerConfig
from lora_api.job import API_VERSION, KIND, LoRATrainingJob, is_legal_name
from lora_api.problems import InvalidDocument, Problem, parse
from lora_api.suggestions import model_in
from lora_api.yamlfile import read_documents
from lora_operator.core.validate import problems_of_job
from lora_operator.core.views import Manifest

_MAX_NAME = 63


@dataclass(frozen=True)
class Converted:
    """A manifest, and what reads or works differently than in the file."""

    manifest: Manifest
    notes: tuple[str, ...]


def convert_file(
    file: str,
    variables: Mapping[str, str],
    *,
    process: int | None = None,
    name: str | None = None,
    store: str | None = None,
) -> str:
    """The manifest as text, with the notes as comments.

    Args:
        file: An ai-toolkit file; `-` is standard input.
        variables: The environment, for `${NAME}` in the file.
        process: Which of several processes, from 0.
        name: `metadata.name`; left out, made from the file's own name.
        store: `spec.output.store`.

    Raises:
        UnreadableError: When the file can't be read.
        InvalidDocument: When it can't be converted; every problem has its path in the file.
    """
    documents = read_documents(file)
    if len(documents) != 1 or not aitoolkit.is_ai_toolkit(documents[0].value):
        kinds = [d.value["kind"] for d in documents if isinstance(d.value, dict) and "kind" in d.value]
        is_manifest = f"; it is a manifest ({kinds[0]}) already" if kinds else ""
        raise InvalidDocument([Problem("", f"is no ai-toolkit file, which has a list config.process{is_manifest}")])
    converted = convert(documents[0].value, variables, process=process, name=name, store=store)
    return as_text(converted, documents[0].place)


def convert(
    raw: Any,
    variables: Mapping[str, str],
    *,
    process: int | None = None,
    name: str | None = None,
    store: str | None = None,
) -> Converted:
    """The same for a parsed file. Raises InvalidDocument."""
    imported = aitoolkit.convert(raw, variables, process, lambda place: Path(place).exists())
    parse(TrainerConfig, imported.config, imported.path)
    name = name or name_from(imported.name)
    if not is_legal_name(name):
        text = f"{name!r} is not a legal name: lower-case letters, digits, '-' and '.', at most 253 characters"
        raise InvalidDocument([Problem("metadata.name", text)])
    spec: Manifest = {"config": ordered(TrainerConfig, imported.config)}
    if store is not None:
        spec["output"] = {"store": store}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    problems = problems_of_job(parse(LoRATrainingJob, manifest))
    if problems:
        raise InvalidDocument(problems)
    notes = imported.notes
    if imported.folder:
        notes = (*notes, f"ignored: training_folder: {imported.folder} (runs go where spec.output and the profile say)")
    return Converted(manifest, notes)


def name_from(text: str) -> str:
    """A legal object name out of any words: `My first LoRA_v1` is `my-first-lora-v1`."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MAX_NAME].rstrip("-")
    return words or "lora"


def ordered(model: type[BaseModel], raw: Any) -> Any:
    """Plain data in the order of the types' fields, without what is empty."""
    if isinstance(raw, list):
        return [ordered(model, item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    found = {}
    for name, field in model.model_fields.items():
        value, inner = raw.get(name), model_in(field.annotation)
        if value not in (None, "", [], {}):
            found[name] = ordered(inner, value) if inner else value
    return found


def as_text(converted: Converted, place: str) -> str:
    """The manifest as YAML, under its notes."""
    relative = [path for path in _folders(converted.manifest) if not path.startswith(("/", "~")) and "://" not in path]
    notes = list(converted.notes)
    if relative:
        notes.append(f"relative folders ({', '.join(relative)}) are relative to the folder of this manifest")
    lines = [f"# Converted from {place}, a configuration of ai-toolkit."]
    for note in notes:
        lines += textwrap.wrap(note, 116, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)
    body = yaml.safe_dump(converted.manifest, sort_keys=False, allow_unicode=True, width=10_000)
    return "\n".join(lines) + "\n" + body


def _folders(manifest: Manifest) -> list[str]:
    config = manifest["spec"]["config"]
    masks = [each["mask_path"] for each in config["datasets"] if each.get("mask_path")]
    return [config["model"]["name_or_path"], *(each["folder_path"] for each in config["datasets"]), *masks]
