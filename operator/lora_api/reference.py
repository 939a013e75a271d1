"""The reference page: every field of both kinds, from the schemas that the API server enforces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lora_api import reference_words as words
from lora_api.cel import MUTABLE_SPEC_PATHS
from lora_api.crd import JOB_COLUMNS, Column, job_crd, profile_crd
from lora_api.exit_codes import NEVER_RETRIED, ExitCode, reason_of
from lora_api.job import API_VERSION, KIND
from lora_api.patterns import PATTERN_WORDS
from lora_api.profile import PROFILE_KIND
from lora_api.schema import ITEMS, MAX_LENGTH, ONE_LINE, Path, Schema, at

Rows = list[tuple[str, ...]]


def reference() -> str:
    """The page as Markdown."""
    job = _schema(job_crd())
    profile = _schema(profile_crd())
    return (
        "\n\n".join(
            [
                words.INTRODUCTION,
                f"## {KIND}",
                words.JOB.format(api_version=API_VERSION, kind=KIND),
                *_sections(job, ("spec",), mutability=True),
                "### Table of `kubectl get ltj`",
                _columns(JOB_COLUMNS),
                "## Status of a job",
                words.STATUS,
                *_sections(job, ("status",)),
                "### Conditions",
                _table(("Type", "True when"), [(f"`{kind}`", text) for kind, text in words.CONDITIONS.items()]),
                "### Phases",
                words.PHASES_INTRODUCTION,
                _table(("Phase", "Meaning"), [(f"`{phase}`", text) for phase, text in words.PHASES.items()]),
                f"## {PROFILE_KIND}",
                words.PROFILE.format(api_version=API_VERSION, kind=PROFILE_KIND),
                *_sections(profile, ("spec",)),
                "## Exit codes of the trainer",
                words.EXIT_CODES_INTRODUCTION,
                _table(("Code", "Reason", "Retried", "Meaning"), _exit_codes()),
                "## Run directory",
                words.RUN_DIRECTORY_INTRODUCTION,
                _table(("Key", "Written by", "Content"), [(f"`{k}`", *rest) for k, *rest in words.RUN_DIRECTORY]),
                "## Environment",
                words.ENVIRONMENT_INTRODUCTION,
                _table(
                    ("Variable", "Read by", "Default", "Meaning"), [(f"`{k}`", *rest) for k, *rest in words.ENVIRONMENT]
                ),
            ]
        )
        + "\n"
    )


def _schema(crd: dict[str, Any]) -> Schema:
    schema: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _sections(root: Schema, path: Path, *, mutability: bool = False) -> Iterator[str]:
    """One section for the object at `path`, then one for each object in it."""
    node = at(root, path)
    yield f"### `{shown(path)}`"
    yield str(node["description"])
    header = ("Field", "Type", "Default", "Range", *(("Mutable",) if mutability else ()), "Meaning")
    yield _table(
        header, [_row(path, name, child, node, mutability=mutability) for name, child in node["properties"].items()]
    )
    for name, child in node["properties"].items():
        below = (*path, name) if child["type"] != "array" else (*path, name, ITEMS)
        if "properties" in at(root, below):
            yield from _sections(root, below, mutability=mutability)


def _row(path: Path, name: str, node: Schema, parent: Schema, *, mutability: bool) -> tuple[str, ...]:
    mutable = (_mutable((*path, name)),) if mutability else ()
    return (f"`{name}`", type_of(node), default_of(name, node, parent), range_of(node), *mutable, node["description"])


def _mutable(path: Path) -> str:
    """Whether a field of a job's spec may change once the job exists."""
    below_spec = path[1:]
    if any(below_spec[: len(mutable)] == mutable for mutable in MUTABLE_SPEC_PATHS):
        return "yes"
    return "partly" if any(mutable[: len(below_spec)] == below_spec for mutable in MUTABLE_SPEC_PATHS) else "no"


def shown(path: Path) -> str:
    """`spec.config.datasets[].folder_path`."""
    return ".".join(path).replace(f".{ITEMS}", ITEMS)


def type_of(node: Schema) -> str:
    """The type in a word or two; the choices where there are some."""
    if "enum" in node:
        return ", ".join(f"`{choice}`" for choice in node["enum"])
    if node["type"] == "array":
        return f"list of {type_of(node['items'])}"
    if "additionalProperties" in node:
        return f"map of {type_of(node['additionalProperties'])}"
    return str(node["type"])


def default_of(name: str, node: Schema, parent: Schema) -> str:
    """What is taken when the field is left out; objects show theirs field by field, in their own section."""
    if name in parent.get("required", ()):
        return "required"
    if "default" not in node:
        return "-"
    if "properties" in node:
        return "see below"
    return f"`{json.dumps(node['default'])}`"


def range_of(node: Schema) -> str:
    """Limits in words."""
    if node["type"] == "array":
        each = range_of(node["items"])
        count = _count(node.get("minItems", 0), node["maxItems"], "items")
        return count if each == "-" else f"{count}, each {each}"
    parts = []
    if "minimum" in node or "maximum" in node:
        parts.append(_interval(node))
    if "multipleOf" in node:
        parts.append(f"multiple of {node['multipleOf']}")
    shaped = node.get("pattern", ONE_LINE) != ONE_LINE
    if shaped:
        parts.append(PATTERN_WORDS.get(node["pattern"], f"`{node['pattern']}`"))
    if "maxLength" in node and not (shaped and node["maxLength"] == MAX_LENGTH):
        parts.append(_count(node.get("minLength", 0), node["maxLength"], "characters"))
    return ", ".join(parts) or "-"


def _interval(node: Schema) -> str:
    low, high = (f"{node[key]:.15g}" if key in node else None for key in ("minimum", "maximum"))
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if low is not None and high is not None and not above and not below:
        return f"{low} to {high}"
    ends = [f"{'above' if above else 'at least'} {low}"] if low is not None else []
    ends += [f"{'below' if below else 'at most'} {high}"] if high is not None else []
    return ", ".join(ends)


def _count(least: int, most: int, what: str) -> str:
    return f"{least} to {most} {what}" if least else f"at most {most} {what}"


def _columns(columns: tuple[Column, ...]) -> str:
    return _table(
        ("Column", "From", "Meaning"),
        [(c.name + (" (`-o wide`)" if c.wide else ""), f"`{c.path}`", c.description) for c in columns],
    )


def _exit_codes() -> Rows:
    return [
        (str(int(code)), f"`{reason_of(code)}`", "-" if code == 0 else "no" if code in NEVER_RETRIED else "yes", text)
        for code, text in ((code, words.EXIT_CODES[code]) for code in ExitCode)
    ]


def _table(header: tuple[str, ...], rows: Rows) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
