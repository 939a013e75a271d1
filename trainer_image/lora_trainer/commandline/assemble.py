"""From flags and file to a configuration: flags override the file, and every problem is told at the flag that made it."""

from __future__ import annotations

import argparse
import copy
import re
from dataclasses import dataclass, field
from typing import Any

from lora_api.config import TrainerConfig
from lora_api.foreign_words import VALUE_ALIASES
from lora_api.problems import InvalidDocument, Problem, parse
from lora_trainer.commandline import flags
from lora_trainer.commandline.refusal import Refusal
from lora_trainer.commandline.sources import Source

_INDEX = re.compile(r"([^\[]*)\[(\d+)\]")


@dataclass
class Draft:
    """A configuration that is being put together."""

    raw: dict[str, Any]
    file: str | None = None
    root: str = ""  # path of the configuration in the file
    origins: dict[str, str] = field(default_factory=dict)  # path -> the flag that set it

    def put(self, path: str, value: Any, flag: str) -> None:
        """Sets a field; one below `datasets` without a number in every dataset.

        Raises:
            Refusal: When the path leads through something that holds no fields.
        """
        if path.startswith("datasets."):
            rest = path.removeprefix("datasets.")
            datasets = self.raw.setdefault("datasets", [])
            for number in range(len(datasets) if isinstance(datasets, list) else 0):
                self.put(f"datasets[{number}].{rest}", value, flag)
            return
        *parents, last = path.split(".")
        owner: Any = self.raw
        for part in parents:
            owner = _below(owner, part, flag)
        owner[last] = value
        self.origins[path] = flag

    def check(self) -> TrainerConfig:
        """The configuration, validated.

        Raises:
            Refusal: With every problem at its flag, or at its place in the file.
        """
        self.raw.setdefault("model", {})
        try:
            return parse(TrainerConfig, self.raw)
        except InvalidDocument as error:
            raise Refusal("\n".join(map(self.told, error.problems))) from error

    def told(self, problem: Problem) -> str:
        """A problem where the user can put it right."""
        path = problem.path
        flag = self.origins.get(path) or next(
            (f for p, f in self.origins.items() if path.startswith((p + "[", p + "."))), None
        )
        if flag:
            return f"{flag}: {problem.message}"
        if self.file:
            return f"{self.file}: {'.'.join(filter(None, (self.root, path)))}: {problem.message}"
        general = "datasets.folder_path" if path == "datasets" else re.sub(r"\[\d+\]", "", path)
        named = next((f"--{name}" for name, own in flags.FIELDS.items() if own == general), f"--set {path}")
        return f"{named}: {problem.message}"


def _below(owner: Any, part: str, flag: str) -> Any:
    match = _INDEX.fullmatch(part)
    key, number = (match[1], int(match[2])) if match else (part, None)
    inner = owner.setdefault(key, {} if number is None else []) if isinstance(owner, dict) else None
    if number is not None:
        if not isinstance(inner, list) or number >= len(inner):
            count = len(inner) if isinstance(inner, list) else 0
            raise Refusal(f"{flag}: {part}: there are {count} of them, counted from 0")
        inner = inner[number]
    if not isinstance(inner, dict):
        raise Refusal(f"{flag}: {part} holds no fields")
    return inner


def draft(given: argparse.Namespace, source: Source | None) -> Draft:
    """The configuration of flags and file, not yet validated.

    Raises:
        Refusal: When flags exclude each other or one can't be understood.
    """
    if given.num_epochs is not None and given.steps is not None:
        raise Refusal("--num_epochs and --steps exclude each other: both say how long to train")
    found = Draft(copy.deepcopy(source.config) if source else {}, given.config, source.root if source else "")
    if given.train_data:
        _take_data(found, given.train_data)
    for name, path in flags.FIELDS.items():
        text = getattr(given, name)
        if text is not None and name != "train_data":
            found.put(path, _value(name, path, text), f"--{name}")
    for entry in given.set:
        path, equals, text = entry.partition("=")
        path = path.strip()
        if not equals or not path:
            raise Refusal(f"--set {entry}: expected PATH=VALUE, such as --set train.weight_decay=0.01")
        found.put(path, flags.read_value(flags.field_at(path), text), f"--set {path}")
    return found


def _take_data(found: Draft, folders: list[str]) -> None:
    """Folders of the command line stand in place of the file's; what the first dataset of the file says holds for all."""
    before = found.raw.get("datasets")
    pattern = before[0] if isinstance(before, list) and before and isinstance(before[0], dict) else {}
    found.raw["datasets"] = [{**pattern, "folder_path": folder} for folder in folders]
    for number in range(len(folders)):
        found.origins[f"datasets[{number}].folder_path"] = "--train_data"


def _value(name: str, path: str, text: Any) -> Any:
    field_info = flags.field_at(path)
    if isinstance(text, list):
        if name == "prompt":
            return text
        values = [flags.read_value(None, word) for part in text for word in part.split(",") if word]
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if name == "mixed_precision":
        return {"no": "fp32"}.get(text, VALUE_ALIASES.get(text, text))
    return flags.read_value(field_info, text)
