"""Manifests from files: YAML or JSON, several documents, strict where mistakes hide.

Two departures from plain PyYAML: a key that is there twice is an error (the first value would be lost in silence), and
`1e-4` is a number, as it is to Kubernetes (YAML 1.1 asks for `1.0e-4`). Dates stay text, as in JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_REPLACED = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}


class UnreadableError(ValueError):
    """The file can't be read, or is not YAML; the message says where."""


@dataclass(frozen=True)
class Document:
    """One document of a file."""

    place: str  # job.yaml, or job.yaml#2 where a file has several
    value: Any
    folder: Path  # what relative paths in it are relative to


class _Loader(yaml.SafeLoader):
    """See the module's docstring."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            if key.value in seen:
                first = seen[key.value]
                text = f"the key {key.value!r} is there twice (first in line {first.line + 1})"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
            seen[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_documents(name: str) -> list[Document]:
    """All documents of a file that are not empty; `-` is standard input.

    Raises:
        UnreadableError: When the file can't be read or is not YAML or JSON.
    """
    text = _read(name)
    try:
        values = [_load_json(text)] if name.endswith(".json") else list(_load_yaml(text))
    except yaml.MarkedYAMLError as error:
        raise UnreadableError(f"{name}: {_words(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{name}: {error}") from error
    values = [value for value in values if value is not None]
    folder = Path.cwd() if name == "-" else Path(name).resolve().parent
    several = len(values) > 1
    shown = "stdin" if name == "-" else name
    return [
        Document(f"{shown}#{number}" if several else shown, value, folder)
        for number, value in enumerate(values, start=1)
    ]


def _read(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise UnreadableError(f"{name}: can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{name}: is not UTF-8 text (byte {error.start})") from error


def _load_yaml(text: str) -> Iterator[Any]:
    loader = _Loader(text)
    try:
        while loader.check_data():  # type: ignore[no-untyped-call]
            yield loader.get_data()
    finally:
        loader.dispose()


def _load_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} is there twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error


def _words(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    context = f" ({error.context})" if error.context and not error.context.startswith("while constructing") else ""
    return f"{where}{error.problem or 'not YAML'}{context}"


def scalar(text: str) -> Any:
    """One value as YAML reads it: `1e-4` is a number, `[a, b]` a list.

    Raises:
        UnreadableError: When it is not YAML.
    """
    try:
        values = list(_load_yaml(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{text!r} is not a YAML value") from error
    return values[0] if len(values) == 1 else text
