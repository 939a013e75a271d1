"""What is found while a file is read: problems, notes, and the keys that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from lora_api.problems import Problem
from lora_api.suggestions import suggestion
from lora_api.wording import short, type_name


@dataclass(frozen=True)
class Ignored:
    """A key that has no effect here; a note says so.

    Args:
        why: What happens instead, in a few words.
        quiet: Values besides false and emptiness that ask for what happens here anyway: no note.
        always_quiet: The key alone says nothing that anybody could miss.
    """

    why: str = ""
    quiet: tuple[Any, ...] = ()
    always_quiet: bool = False


@dataclass(frozen=True)
class Refused:
    """A key that would change what is trained, and that this trainer lacks.

    Args:
        why: What it asks for, as the end of the sentence `... is not supported`.
        off: Values that switch it off; they mean nothing and are passed over.
        instead: What to do, where there is something better than removing it.
    """

    why: str
    off: tuple[Any, ...] = (False, "", 0)
    instead: str = ""


Decision = Ignored | Refused
Table = Mapping[str, Decision]


@dataclass
class Findings:
    """Collects over the whole file, so that everything is said at once.

    Args:
        is_local: Whether a place in the file is there on this machine.
    """

    is_local: Callable[[str], bool] = lambda place: False  # noqa: ARG005 - nothing is known to be there
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)

    def problem(self, path: str, message: str) -> None:
        """Something that can't be converted."""
        self.problems.append(Problem(path, message))

    def note(self, text: str) -> None:
        """Something that reads or works differently here; each is said once."""
        if text not in self.notes:
            self.notes.append(text)

    def all_notes(self) -> tuple[str, ...]:
        """The notes, with the defaults that were written out."""
        if not self.defaults:
            return tuple(self.notes)
        return (*self.notes, f"left out in the file, written with the value it has there: {', '.join(self.defaults)}")


class Block:
    """One object of the file. Every key is taken by a conversion, or copied, or decided by a table, or unknown.

    Args:
        raw: The object.
        path: Where it stands in the file, for problems.
        name: Short name for notes, such as `train`.
        findings: Where to say what was found.
    """

    def __init__(self, raw: Any, path: str, name: str, findings: Findings) -> None:
        self.path, self.name, self.findings = path, name, findings
        if raw is not None and not isinstance(raw, dict):
            findings.problem(path, f"found {short(raw)} ({type_name(raw)}), expected an object")
        self._left: dict[str, Any] = dict(raw) if isinstance(raw, dict) else {}
        self._taken: set[str] = set()
        self.out: dict[str, Any] = {}

    def has(self, key: str) -> bool:
        """Whether the file gives a value for it."""
        return self._left.get(key) is not None

    def peek(self, key: str) -> Any:
        """The value as it stands: converted already, or as in the file; None where there is none."""
        return self.out.get(key, self._left.get(key))

    def take(self, key: str) -> Any:
        """The value, taken out; None where there is none."""
        self._taken.add(key)
        return self._left.pop(key, None)

    def inner(self, key: str) -> Block:
        """The object under a key, taken out."""
        return Block(self.take(key), f"{self.path}.{key}", f"{self.name}.{key}".removeprefix("."), self.findings)

    def rename(self, key: str, target: str) -> None:
        """Copies a value under our name for it; our own name in the file wins."""
        value = self.take(key)
        if value is not None and not self.has(target):
            self.out[target] = value

    def default(self, key: str, value: Any, target: str = "") -> None:
        """Writes out what a key means there when it is left out, because it means something else here."""
        target = target or key
        if not self.has(key) and target not in self.out:
            self.out[target] = value
            self.findings.defaults.append(f"{self.name}.{target} {short(value)}")

    def problem(self, key: str, message: str) -> None:
        """A problem at one of this block's keys."""
        self.findings.problem(f"{self.path}.{key}".removeprefix("."), message)

    def note(self, text: str) -> None:
        """See `Findings.note`."""
        self.findings.note(text)

    def finish(self, table: Table, model: type[BaseModel] | None = None) -> dict[str, Any]:
        """Copies keys that the trainer has under the same name, decides the others by the table, reports the rest.

        A field that the trainer gets later is copied from then on: it comes before the table.
        """
        native = set(model.model_fields) if model is not None else set()
        for key, value in self._left.items():
            if key in native:
                if value is not None:
                    self.out[key] = value
            elif key in table:
                self._decide(key, value, table[key])
            else:
                known = sorted({*native, *table, *self._taken})
                self.problem(key, "unknown key" + suggestion(key, known))
        self._left = {}
        return self.out

    def _decide(self, key: str, value: Any, decision: Decision) -> None:
        if value is None:
            return
        if isinstance(decision, Ignored):
            is_off = value is False or value in ("", [], {})
            if not (decision.always_quiet or is_off or value in decision.quiet):
                why = f" ({decision.why})" if decision.why else ""
                self.note(f"ignored: {f'{self.name}.{key}'.removeprefix('.')}: {short(value)}{why}")
        elif value not in decision.off and value not in ([], {}):
            instead = decision.instead or "remove the key to go on without it"
            self.problem(key, f"{short(value)}: {decision.why} is not supported; {instead}")
