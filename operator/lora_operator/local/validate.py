"""`lora-operator validate`: everything that can be said about manifests without a cluster. Reads files, decides, no output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_api.aitoolkit import is_ai_toolkit
from lora_api.job import GROUP, KIND, LoRATrainingJob
from lora_api.memory.words import report_for
from lora_api.problems import InvalidDocument, Problem, parse
from lora_api.profile import PROFILE_KIND, LoRATrainingProfile
from lora_api.suggestions import suggestion
from lora_api.yamlfile import Document, UnreadableError, read_documents
from lora_operator.core.validate import problems_of_job
from lora_operator.local.convert import convert
from lora_operator.local.machine import environment

_KINDS = (KIND, PROFILE_KIND)


@dataclass
class Report:
    """What was found in all files."""

    problems: list[str] = field(default_factory=list)  # "FILE: PATH: MESSAGE"
    notes: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)  # a table for each job without problems
    checked: int = 0  # documents of our kinds


def validate_files(names: Sequence[str], *, gpu_gib: float | None = None) -> Report:
    """Checks every document of our kinds; jobs are also held against a profile that is among the files.

    Args:
        names: Of the files; `-` is standard input.
        gpu_gib: Memory of the GPUs that jobs will run on; None where it is not known.
    """
    files = {name: _read(name) for name in names}
    profiles = _profiles_among([document for found in files.values() if isinstance(found, list) for document in found])
    report = Report()
    for name, found in files.items():
        if isinstance(found, UnreadableError):
            report.problems.append(str(found))
        elif not found:
            report.notes.append(f"{name}: holds no document")
        else:
            for document in found:
                before = len(report.problems)
                _check(document, profiles, report)
                if len(report.problems) == before:
                    report.memory += _memory_of(document, gpu_gib)
    return report


def _memory_of(document: Document, gpu_gib: float | None) -> list[str]:
    """The memory estimate of a job that is valid; nothing for other documents."""
    raw = document.value
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        return []
    spec = parse(LoRATrainingJob, raw).spec
    processes = (spec.resources.nodes or 1) * (spec.resources.gpus_per_node or 1)
    lines = report_for(spec.config, gpu_gib, processes)
    return [f"{document.place}: {lines[0]}", *lines[1:]] if lines else []


def problems_in(raw: Any, profiles: dict[str, LoRATrainingProfile] | None = None) -> list[Problem]:
    """All that is wrong with one document of our kinds."""
    try:
        if raw.get("kind") == PROFILE_KIND:
            parse(LoRATrainingProfile, raw)
            return []
        job = parse(LoRATrainingJob, raw)
    except InvalidDocument as error:
        return error.problems
    return problems_of_job(job, (profiles or {}).get(job.spec.profile))


def kind_problem(raw: Any) -> Problem | None:
    """Why a document is none of ours although it seems to be meant so; None when it is ours."""
    if not isinstance(raw, dict):
        return Problem("", f"holds a {type(raw).__name__}, expected a Kubernetes object with apiVersion, kind and spec")
    kind = raw.get("kind")
    if kind in _KINDS:
        return None
    if not isinstance(kind, str):
        return Problem("kind", f"is missing; expected {' or '.join(_KINDS)}")
    return Problem("kind", f"{kind!r} is not one of {', '.join(_KINDS)}{suggestion(kind, _KINDS)}")


def _read(name: str) -> list[Document] | UnreadableError:
    try:
        return read_documents(name)
    except UnreadableError as error:
        return error


def _profiles_among(documents: list[Document]) -> dict[str, LoRATrainingProfile]:
    found = {}
    for document in documents:
        if isinstance(document.value, dict) and document.value.get("kind") == PROFILE_KIND:
            try:
                profile = parse(LoRATrainingProfile, document.value)
            except InvalidDocument:
                continue  # said where the profile itself is checked
            found[profile.metadata.name] = profile
    return found


def _check(document: Document, profiles: dict[str, LoRATrainingProfile], report: Report) -> None:
    raw = document.value
    if is_ai_toolkit(raw):
        _check_ai_toolkit(document, report)
        return
    wrong = kind_problem(raw)
    if wrong is not None and _belongs_to_others(raw):
        report.notes.append(f"{document.place}: skipped, kind {raw['kind']} is not ours")
        return
    report.checked += 1
    problems = [wrong] if wrong is not None else problems_in(raw, profiles)
    report.problems += [f"{document.place}: {problem}" for problem in problems]


def _check_ai_toolkit(document: Document, report: Report) -> None:
    report.checked += 1
    report.notes.append(f"{document.place}: is an ai-toolkit file; `lora-operator convert` writes it as a manifest")
    try:
        convert(document.value, environment())
    except InvalidDocument as error:
        report.problems += [f"{document.place}: {problem}" for problem in error.problems]


def _belongs_to_others(raw: Any) -> bool:
    """Whether it is a Kubernetes object of another API group: files may hold Secrets and the like beside a job."""
    if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
        return False
    version = raw.get("apiVersion")
    return isinstance(version, str) and version.partition("/")[0] != GROUP and raw["kind"] not in _KINDS
