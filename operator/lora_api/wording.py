"""Pydantic's errors in words: what was found, what was expected, and what to write instead where that is plain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lora_api.patterns import PATTERN_WORDS
from lora_api.suggestions import suggestion

Context = Mapping[str, Any]

_EXPECTED = {
    "tuple_type": "a list",
    "model_type": "an object",
    "dict_type": "an object",
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}


def message(detail: ErrorDetails, belongs: type[BaseModel] | None = None) -> str:
    """One line about one error; the field's path stands before it.

    Args:
        detail: Pydantic's error.
        belongs: Type of the object, or of the list's objects, that belongs there; None for other fields.
    """
    say = _SAID.get(detail["type"])
    context: Context = detail.get("ctx") or {}
    return say(detail["input"], context) if say else _wrong_type(detail, belongs)


def _outside(words: str, key: str) -> Callable[[Any, Context], str]:
    def say(found: Any, context: Context) -> str:
        if isinstance(found, float) and not math.isfinite(found):
            return f"{short(found)} is not a finite number"
        return f"{short(found)} {words} {_number(context[key])}"

    return say


def _choice(found: Any, context: Context) -> str:
    choices = [choice.strip("' ") for choice in str(context.get("expected", "")).replace(" or ", ", ").split(", ")]
    if len(choices) == 1:
        return f"found {short(found)}, expected {choices[0]}"
    return f"{short(found)} is not one of {', '.join(choices)}" + suggestion(str(found), choices)


def _too_short(found: Any, context: Context) -> str:
    least = context["min_length"]
    has = "is empty" if not found else f"{short(found)} has {_count(found)}"
    return f"{has}; expected at least {_count(found, least)}"


def _too_long(found: Any, context: Context) -> str:
    return f"has {_count(found)}; expected at most {context['max_length']}"


def _count(found: Any, number: int | None = None) -> str:
    number = len(found) if number is None else number
    return f"{number} {'character' if isinstance(found, str) else 'item'}{'' if number == 1 else 's'}"


def _mismatch(found: Any, context: Context) -> str:
    pattern = str(context.get("pattern"))
    return f"found {short(found)}, expected {PATTERN_WORDS.get(pattern, f'text that matches {pattern}')}"


def _missing(_found: Any, _context: Context) -> str:
    return "is required, but missing"


def _not_json(_found: Any, context: Context) -> str:
    return f"is not valid JSON: {context.get('error')}"


def _wrong_type(detail: ErrorDetails, belongs: type[BaseModel] | None) -> str:
    found, kind = detail["input"], detail["type"]
    wanted = _EXPECTED.get(kind) or detail["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
    instead = _as_object(found, kind, belongs) if belongs else _instead(found, kind)
    return f"found {short(found)} ({type_name(found)}), expected {wanted}" + (f"; write {instead}" if instead else "")


def _as_object(found: Any, kind: str, belongs: type[BaseModel]) -> str | None:
    """`[{value: 3}]` for 3, where an object needs one key only and the value fits it; an object put into a list."""
    needed = [field.alias or name for name, field in belongs.model_fields.items() if field.is_required()]
    if len(needed) != 1 or kind not in ("tuple_type", "model_type"):
        return None
    filled = found if isinstance(found, dict) else {needed[0]: found}
    try:
        belongs.model_validate_json(json.dumps(filled, default=str), strict=True)
    except ValidationError:
        return None
    written = "{" + ", ".join(f"{key}: {short(value)}" for key, value in filled.items()) + "}"
    return f"[{written}]" if kind == "tuple_type" else written


def _instead(found: Any, kind: str) -> str | None:
    """The same value in the right type, where there is no doubt about it."""
    if kind == "string_type" and isinstance(found, bool | int | float):
        return json.dumps(json.dumps(found))
    if kind == "tuple_type" and isinstance(found, str | bool | int | float):
        return f"[{short(found)}]"
    if kind == "bool_type" and isinstance(found, str) and found.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "true" if found.lower() in ("true", "yes", "on") else "false"
    if kind in ("int_type", "float_type", "int_from_float") and not isinstance(found, bool):
        return _as_number(found, whole=kind != "float_type")
    return None


def _as_number(found: Any, *, whole: bool) -> str | None:
    try:
        value = float(found)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(value) or (whole and value != int(value)):
        return None
    return _number(value)


def _number(value: Any) -> str:
    """A limit as people write it: 0 for 0.0, 10000000 for 1e7, 0.0001 for 1e-4."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def short(value: Any) -> str:
    """The value as JSON, cut off where it gets long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def type_name(value: Any) -> str:
    """What JSON calls the value's type."""
    names = {dict: "object", list: "list", tuple: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, int | float) else type(value).__name__)


_SAID: dict[str, Callable[[Any, Context], str]] = {
    "missing": _missing,
    "greater_than_equal": _outside("is below the minimum", "ge"),
    "greater_than": _outside("is too small; expected a value above", "gt"),
    "less_than_equal": _outside("is above the maximum", "le"),
    "less_than": _outside("is too large; expected a value below", "lt"),
    "enum": _choice,
    "literal_error": _choice,
    "too_short": _too_short,
    "string_too_short": _too_short,
    "too_long": _too_long,
    "string_too_long": _too_long,
    "string_pattern_mismatch": _mismatch,
    "json_invalid": _not_json,
}
