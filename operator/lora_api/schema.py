"""Structural schemas (apiextensions.k8s.io/v1) from pydantic types.

The API server knows a part of JSON schema, in the spelling of draft 4: references are put in place, an optional field is
one that may be absent, exclusive limits are flags beside the limit. What a type leaves open is bounded here, because the
server estimates what a CEL rule could cost from the largest object that fits.

References:
    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/; held against a
    real API server by tests/integration/test_crd_*.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
Path = tuple[str, ...]  # ("spec", "config", "datasets", "[]", "folder_path"); "[]" is a list's item

ITEMS = "[]"
MAX_LENGTH, MAX_ITEMS, MAX_PROPERTIES = 1024, 64, 64  # where the type sets no limit
ONE_LINE = "^[^\\x00-\\x1f]*$"

_PLAIN = (
    "description",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "multipleOf",
    "maxProperties",
)
_FORMATS = {"integer": "int64", "number": "double"}


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a type, fields in the order of the source."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(raw, raw.get("$defs", {}))


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    node = _in_place(node, definitions)
    kind = node.get("type")
    assert kind in ("object", "array", "string", "integer", "number", "boolean"), f"no structural type for {node}"
    schema: Schema = {key: node[key] for key in ("description",) if key in node}
    schema["type"] = kind
    if kind in _FORMATS:
        schema["format"] = _FORMATS[kind]
    schema |= {key: node[key] for key in _PLAIN if key in node and key not in schema}
    if "const" in node:
        schema["enum"] = [node["const"]]
    schema |= _limits(node)
    if node.get("default") is not None:
        schema["default"] = without_nulls(node["default"])
    if kind == "array":
        schema |= {"x-kubernetes-list-type": "atomic", "items": _convert(node["items"], definitions)}
    if kind == "object":
        schema |= _members(node, definitions)
    return schema


def _in_place(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The node without references and without `null` among its types; what stands beside a reference wins."""
    merged = dict(node)
    while "$ref" in merged or "anyOf" in merged:
        if "$ref" in merged:
            inner = definitions[merged.pop("$ref").rpartition("/")[2]]
        else:
            inner, *others = [option for option in merged.pop("anyOf") if option.get("type") != "null"]
            assert not others, f"a union has no structural schema: {node}"
        merged = {**inner, **merged}
    return merged


def _limits(node: Mapping[str, Any]) -> Schema:
    limits: Schema = {}
    for name in ("minimum", "maximum"):
        exclusive = f"exclusive{name.capitalize()}"
        if exclusive in node:
            limits |= {name: node[exclusive], exclusive: True}
        elif name in node:
            limits[name] = node[name]
    return limits


def _members(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    extra = node.get("additionalProperties")
    if isinstance(extra, Mapping):
        return {"additionalProperties": _convert(extra, definitions)}
    members: Schema = {"required": list(node["required"])} if node.get("required") else {}
    members["properties"] = {name: _convert(child, definitions) for name, child in node.get("properties", {}).items()}
    return members


def without_nulls(value: Any) -> Any:
    """Plain data without the keys whose value is null: absent and null are the same to the API."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def walk(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """Every node below `schema` with its path, itself first."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, (*path, name))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], (*path, ITEMS))


def at(schema: Schema, path: Path) -> Schema:
    """The node at `path`."""
    for part in path:
        schema = schema["items"] if part == ITEMS else schema["properties"][part]
    return schema


def bound(schema: Schema) -> None:
    """Gives every string, list and map that has no upper limit a generous one."""
    for _, node in walk(schema):
        if node["type"] == "string" and "enum" not in node:
            node.setdefault("maxLength", MAX_LENGTH)
        elif node["type"] == "array":
            node.setdefault("maxItems", MAX_ITEMS)
        elif "additionalProperties" in node:
            node.setdefault("maxProperties", MAX_PROPERTIES)


def one_line(schema: Schema) -> None:
    """Refuses control characters in every free string, as `lora_api.config.Line` does."""
    for _, node in walk(schema):
        if node["type"] == "string" and "enum" not in node:
            node.setdefault("pattern", ONE_LINE)
