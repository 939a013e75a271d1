"""Bad input in words: field path, what was found, what was expected, what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lora_api import wording
from lora_api.suggestions import field_suggestion, type_at

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one place."""

    path: str  # spec.config.datasets[0].folder_path
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidDocument(ValueError):  # noqa: N818 - reads as what it is wherever it is caught
    """Input that does not fit its type; `problems` has one entry for each place."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def parse(model: type[Model], raw: object, root: str = "") -> Model:
    """Validates plain data the way the API server does.

    No string passes for a number and no `true` for a rate; a key without a value is a key left out; fields have the one
    spelling that they have on the wire.

    Raises:
        InvalidDocument: With every problem, each at its path.
    """
    text = json.dumps(_without_nulls(raw), default=str)
    try:
        return model.model_validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidDocument(problems_of(error, model, root)) from error


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


def problems_of(error: ValidationError, model: type[BaseModel], root: str = "") -> list[Problem]:
    """One problem for each of pydantic's errors, in the order of the document.

    Args:
        error: What `model.model_validate` raised.
        model: The type that was validated; its field names are the candidates for suggestions.
        root: Path in front of every field, such as `spec`.
    """
    details = error.errors(include_url=False)
    places = [detail["loc"] for detail in details]

    def follows_from_another(detail: ErrorDetails) -> bool:
        """A list whose items are all wrong is also reported as too short."""
        place = detail["loc"]
        return detail["type"] == "too_short" and any(len(p) > len(place) and p[: len(place)] == place for p in places)

    return [_problem(detail, model, root) for detail in details if not follows_from_another(detail)]


def _problem(detail: ErrorDetails, model: type[BaseModel], root: str) -> Problem:
    location = [part for part in detail["loc"] if not _is_noise(part)]
    path = render_path(root, location)
    if detail["type"] == "extra_forbidden":
        return Problem(path, "unknown field" + field_suggestion(model, location, root))
    if detail["type"] == "value_error":
        context: Mapping[str, Any] = detail.get("ctx") or {}
        return _at_the_field_it_names(path, str(context.get("error", detail["msg"])))
    return Problem(path, wording.message(detail, type_at(model, location)))


def _at_the_field_it_names(path: str, message: str) -> Problem:
    """Validators of whole objects start their message with the field they speak of: `train.train_unet: ...`."""
    head, colon, rest = message.partition(": ")
    if colon and re.fullmatch(r"[a-z_][\w.\[\]]*", head, re.IGNORECASE):
        return Problem(f"{path}.{head}" if path else head, rest)
    return Problem(path, message)


def _is_noise(part: int | str) -> bool:
    """Pydantic names the branch of a union in the path; people don't write it."""
    return isinstance(part, str) and (
        part.startswith(("function-", "constrained-", "literal[")) or part in {"str", "int", "float"}
    )


def render_path(root: str, location: Iterable[int | str]) -> str:
    """`("config", "datasets", 0, "folder_path")` as `config.datasets[0].folder_path`."""
    path = root
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
