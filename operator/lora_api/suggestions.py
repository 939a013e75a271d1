"""What somebody may have meant by a word that is not known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_origin

from pydantic import BaseModel

from lora_api.foreign_words import ALIASES, RELATED_VALUES, VALUE_ALIASES

_STAGES = "stages[]."
_TELLING = 3  # letters that are enough to know a word by its beginning
_ALIKE, _SLIP = 0.6, 0.9  # of difflib's ratio: its own default for close matches; one letter of ten


def suggestion(name: str, candidates: Sequence[str]) -> str:
    """`; did you mean ...?`, with two names where both are equally near, or nothing when none is near."""
    return _asked(_renamed(name, candidates) or _near(name, candidates))


def field_suggestion(model: type[BaseModel], location: Sequence[int | str], root: str) -> str:
    """The same for an unknown field: a field beside it under another name, the same field elsewhere, or one like it.

    Args:
        model: The type that was validated.
        location: Of the unknown field, below `model`.
        root: Path in front of every field of `model`.
    """
    *parent, last = location
    name, beside = str(last), fields_at(model, parent)
    return _asked(_renamed(name, beside) or _elsewhere(model, name, root) or _near(name, beside))


def _asked(meant: str | None) -> str:
    return f"; did you mean {meant}?" if meant else ""


def _renamed(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that differs in capitals and separators only, or that other tools call by this name."""
    plain = name.lower()
    others = (ALIASES.get(plain), VALUE_ALIASES.get(plain), RELATED_VALUES.get(plain))
    same = {_letters(word) for word in (name, *others) if word}
    return next((candidate for candidate in candidates if _letters(candidate) in same), None)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _near(name: str, candidates: Sequence[str]) -> str | None:
    """A word left unfinished, the same words in another order, a word with more behind it, or one spelt much like it."""
    typed = _letters(name)
    letters = {candidate: _letters(candidate) for candidate in candidates}
    unfinished = [c for c, own in letters.items() if len(typed) >= _TELLING and own.startswith(typed)]
    reordered = [c for c, own in letters.items() if sorted(own) == sorted(typed)]
    longer = [c for c, own in letters.items() if len(own) >= _TELLING and typed.startswith(own)]
    if len(unfinished) == 1 or len(reordered) == 1:
        return (reordered if len(reordered) == 1 else unfinished)[0]
    if longer and not _alike(typed, letters, _SLIP):
        return max(longer, key=len)
    return _alike(typed, letters, _ALIKE) or (" or ".join(unfinished) if len(unfinished) == 2 else None)


def _alike(typed: str, letters: Mapping[str, str], least: float) -> str | None:
    ratios = {c: difflib.SequenceMatcher(None, typed, own).ratio() for c, own in letters.items()}
    best = max(ratios.values(), default=0.0)
    nearest = [c for c, ratio in ratios.items() if ratio == best]
    return " or ".join(nearest) if best >= least and len(nearest) <= 2 else None


def _elsewhere(model: type[BaseModel], name: str, root: str) -> str | None:
    """The one path at which a field of that name lies; None when there is none, or more than one.

    A field that refines one of the same name further up (the rank of a rule, below the rank of the network), or for a stage,
    doesn't count.
    """
    wanted = ALIASES.get(name, name)
    if len(wanted) < 2:
        return None  # `r` or `k` may mean anything
    found = [path for path in _all_fields(model, root) if path.rpartition(".")[2] == wanted]
    found = [path for path in found if _STAGES not in path] or found
    folders = [path.removesuffix(wanted) for path in found]
    outermost = [
        p for p, own in zip(found, folders, strict=True) if not any(own != f and own.startswith(f) for f in folders)
    ]
    return outermost[0] if len(outermost) == 1 else None


def _all_fields(model: type[BaseModel], path: str) -> Iterator[str]:
    """Paths of what a person writes: everything but the status."""
    for name, field in model.model_fields.items():
        below = f"{path}.{field.alias or name}".removeprefix(".")
        inner = model_in(field.annotation)
        if name == "status":
            continue
        yield below
        if inner:
            yield from _all_fields(inner, below + ("[]" if get_origin(field.annotation) is tuple else ""))


def fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Wire names of the fields of the type that lies at `location` below `model`."""
    current = type_at(model, location)
    return [field.alias or name for name, field in current.model_fields.items()] if current else []


def type_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The type of the object, or of the list's objects, at `location` below `model`; None for numbers, texts and the like."""
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int) or current is None:
            continue
        field = next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
        current = model_in(field.annotation) if field else None
    return current


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model type in an annotation such as `tuple[DatasetConfig, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = model_in(argument)
        if found:
            return found
    return None


def choices_of(model: type[BaseModel], field: str) -> tuple[str, ...]:
    """The words that a field takes: of a `Literal` or an enumeration, optional or not; none for other fields."""
    return tuple(_choices(model.model_fields[field].annotation))


def _choices(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(member.value) for member in annotation)
    elif get_origin(annotation) is Literal:
        yield from (str(word) for word in annotation.__args__)
    else:
        for argument in getattr(annotation, "__args__", ()):
            yield from _choices(argument)
