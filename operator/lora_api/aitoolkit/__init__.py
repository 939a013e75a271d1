"""Reads configuration files of ostris/ai-toolkit: what they mean there, in this trainer's own configuration. Pure.

Every key has a decision: copied, converted, noted as ignored, or refused because the adapter would be another one. A key
that neither program knows is an error here; there it would be passed over in silence. `convert` is the way in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_api.aitoolkit import tables
from lora_api.aitoolkit.findings import Block, Findings
from lora_api.aitoolkit.process import read_process
from lora_api.problems import InvalidDocument
from lora_api.wording import short

_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_INT = re.compile(r"[-+]?\d+")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Imported:
    """A file as read."""

    name: str  # of the run there
    config: dict[str, Any]  # shaped like `TrainerConfig`; its types have yet to check it
    notes: tuple[str, ...]  # what reads or works differently here, one sentence each
    path: str  # of the process in the file, in front of the paths of problems
    folder: str | None  # `training_folder`: runs lie in folders of their names below it


def is_ai_toolkit(raw: Any) -> bool:
    """Whether a document is meant for ai-toolkit: it has a list of processes."""
    return isinstance(raw, dict) and isinstance(raw.get("config"), dict) and "process" in raw["config"]


def convert(
    raw: Any,
    variables: Mapping[str, str],
    process: int | None = None,
    is_local: Callable[[str], bool] = lambda place: False,  # noqa: ARG005 - nothing is known to be there
) -> Imported:
    """A parsed ai-toolkit file as configuration of this trainer.

    Args:
        raw: The file, see `is_ai_toolkit`.
        variables: The environment, for `${NAME}` in the file.
        process: Which of several processes, from 0; None where there is one.
        is_local: Whether a place is there on this machine; names that are not may be names on the Hub.

    Raises:
        InvalidDocument: With everything that can't be converted, each at its path in the file.
    """
    findings = Findings(is_local)
    filled = _with_name(_with_variables(raw, variables, findings))
    file = Block(filled, "", "", findings)
    if file.take("job") not in ("extension", "train"):
        findings.problem("job", f"found {short(filled.get('job'))}, expected extension, which is how training is begun")
    settings = Block(file.take("config"), "config", "config", findings)
    file.finish(tables.FILE)
    name, processes = settings.take("name"), settings.take("process")
    settings.finish({})
    if not isinstance(name, str) or not name:
        findings.problem("config.name", "is required, but missing")
    chosen, path = _choose(processes, process, findings)
    config = read_process(chosen, path, findings) if chosen is not None else {}
    if findings.problems:
        raise InvalidDocument(findings.problems)
    assert isinstance(chosen, dict)
    return Imported(str(chosen.get("name") or name), config, findings.all_notes(), path, chosen.get("training_folder"))


def _choose(processes: Any, number: int | None, findings: Findings) -> tuple[Any, str]:
    if not isinstance(processes, list) or not processes:
        findings.problem("config.process", f"found {short(processes)}, expected a list with one process")
        return None, ""
    if number is None and len(processes) > 1:
        findings.problem(
            "config.process", f"holds {len(processes)} processes; choose one by its number, 0 to {len(processes) - 1}"
        )
        return None, ""
    if not 0 <= (number or 0) < len(processes):
        findings.problem("config.process", f"has no process {number}; expected 0 to {len(processes) - 1}")
        return None, ""
    return processes[number or 0], f"config.process[{number or 0}]"


def _with_variables(raw: Any, variables: Mapping[str, str], findings: Findings) -> Any:
    """`${NAME}` filled in everywhere. A value that is nothing but a variable may turn out to be a number, as there."""

    def fill(text: str) -> Any:
        missing = [name for name in _VARIABLE.findall(text) if name not in variables]
        for name in missing:
            findings.problem("", f"${{{name}}} stands in the file, but the environment variable {name} is not set")
        if missing:
            return text
        filled = _VARIABLE.sub(lambda match: variables[match[1]], text)
        return _scalar(filled) if _VARIABLE.fullmatch(text) else filled

    return _map_strings(raw, fill)


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _with_name(raw: Any) -> Any:
    """`[name]` everywhere is `config.name`."""
    settings = raw.get("config") if isinstance(raw, dict) else None
    name = settings.get("name") if isinstance(settings, dict) else None
    return _map_strings(raw, lambda text: text.replace("[name]", name)) if isinstance(name, str) else raw


def _map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
