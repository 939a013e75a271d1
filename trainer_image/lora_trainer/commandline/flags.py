"""The flags: short names for common fields of the configuration, `--set` for every other.

What a field takes, its default and its meaning come from the types, so a field that is added there can be set and is in
the help at once.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lora_api.config import TrainerConfig
from lora_api.foreign_words import ALIASES
from lora_api.suggestions import choices_of, model_in, suggestion
from lora_api.yamlfile import UnreadableError, scalar
from lora_trainer.commandline.refusal import Refusal

FIELDS = {
    "base_model": "model.name_or_path",
    "arch": "model.arch",
    "train_data": "datasets.folder_path",
    "resolution": "datasets.resolution",
    "caption_dropout": "datasets.caption_dropout",
    "num_repeats": "datasets.num_repeats",
    "trigger_word": "trigger_word",
    "network_type": "network.type",
    "rank": "network.linear",
    "alpha": "network.linear_alpha",
    "steps": "train.steps",
    "batch_size": "train.batch_size",
    "gradient_accumulation": "train.gradient_accumulation",
    "optimizer": "train.optimizer",
    "learning_rate": "train.lr",
    "lr_scheduler": "train.lr_scheduler",
    "warmup_steps": "train.warmup_steps",
    "mixed_precision": "train.dtype",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "seed": "train.seed",
    "save_every": "save.save_every",
    "max_step_saves": "save.max_step_saves",
    "prompt": "sample.prompts",
    "device": "device",
}
"""Flags that stand for one field of `TrainerConfig`. Those below `datasets` hold for every dataset."""

OTHER_NAMES = {"lr": "learning_rate", "output": "output_dir", "epochs": "num_epochs", "data": "train_data"}
_REPEATED = ("train_data", "resolution", "prompt")
_GROUPS = {
    "Model and data": ("base_model", "arch", "train_data", "resolution", "caption_dropout", "num_repeats", "trigger_word"),
    "Adapter": ("network_type", "rank", "alpha"),
    "Optimisation": (
        "steps", "batch_size", "gradient_accumulation", "optimizer", "learning_rate", "lr_scheduler", "warmup_steps", "mixed_precision",
        "gradient_checkpointing", "seed",
    ),
    "Checkpoints and samples": ("save_every", "max_step_saves", "prompt"),
    "Machine": ("device",),
}  # fmt: skip

_HELP = {
    "base_model": "Folder of the base model: a diffusers pipeline, the one with model_index.json in it.",
    "train_data": "Folder of pictures, each with its caption beside it: photo.png and photo.txt. Searched recursively.",
}
"""Where the command line means something narrower than the field."""

_ABOUT = """Train a LoRA adapter from the command line.

The same command goes on with the run in --output_dir from its newest checkpoint; Ctrl-C saves and stops.
Underscores and dashes in flags are the same."""

_EXIT_CODES = (
    "exit codes: 0 done, 64 configuration, 65 data, 66 no usable checkpoint, 75 try again, 77 credentials, 85 stopped and "
    "saved, 86 out of device memory, 87 loss not finite"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


def field_at(path: str, model: type[BaseModel] = TrainerConfig) -> FieldInfo | None:
    """The field at a dotted path such as `datasets[0].resolution`; None where there is none."""
    field: FieldInfo | None = None
    current: type[BaseModel] | None = model
    for part in path.split("."):
        field = current.model_fields.get(part.partition("[")[0]) if current else None
        if field is None:
            return None
        current = model_in(field.annotation)
    return field


def read_value(field: FieldInfo | None, text: str) -> Any:
    """What a word of the command line stands for in a field: the number, the text or the list that the type takes.

    Where it fits none, it comes back as YAML reads it, for the types to refuse in their own words.
    """
    try:
        value = scalar(text)
    except UnreadableError:
        value = text
    if field is None:
        return value
    candidates = [value, text]
    if not isinstance(value, list):
        candidates += [[value], [scalar(part) for part in text.split(",")] if "," in text else [text], [text]]
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation)  # type: ignore[arg-type]  # never None here
    for candidate in candidates:
        try:
            adapter.validate_json(json.dumps(candidate, default=str), strict=True)
        except ValidationError:
            continue
        return candidate
    return value


def parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """The flags as given; what was not given is None.

    Raises:
        Refusal: For a flag that does not exist, with the one that may be meant.
        SystemExit: After `--help`.
    """
    parser = build_parser(program)
    found, unknown = parser.parse_known_args([_plain(argument) for argument in arguments])
    for word in unknown:
        if word.startswith("--"):
            raise Refusal(f"{word.partition('=')[0]}: unknown flag{meant(word)}")
        again = f"; did you mean --set {word}?" if field_at(word.partition("=")[0]) and "=" in word else ""
        raise Refusal(f"{word!r} belongs to no flag; values follow their flag{again}")
    return found


def meant(word: str) -> str:
    """`; did you mean ...?` for a flag: another one, or a field that `--set` reaches."""
    name = word.partition("=")[0].lstrip("-")
    name = OTHER_NAMES.get(name, ALIASES.get(name, name))
    paths = [path for path in settable() if path.rpartition(".")[2] == name or path == name]
    if len(paths) == 1:
        short = next((flag for flag, path in FIELDS.items() if path == paths[0]), None)
        return f"; did you mean --{short}?" if short else f"; did you mean --set {paths[0]}=VALUE?"
    flags = [*FIELDS, "output_dir", "num_epochs", "config", "process", "set", "nproc_per_node", "run_config"]
    near = suggestion(name, flags)
    return near.replace("did you mean ", "did you mean --").replace(" or ", " or --")


def _plain(argument: str) -> str:
    """`--nproc-per-node=2` as `--nproc_per_node=2`; values stay as they are."""
    name, equals, value = argument.partition("=")
    plain = name[2:].replace("-", "_") if name.startswith("--") else None
    if plain is None or name == "--":
        return argument
    return "--" + OTHER_NAMES.get(plain, plain) + equals + value


def build_parser(program: str) -> argparse.ArgumentParser:
    """The parser, with every flag documented from the types."""
    parser = _Parser(
        prog=program, description=_ABOUT, epilog=f"{_settable_help()}\n\n{_EXIT_CODES}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, usage=f"{program} --base_model DIR --train_data DIR "
        "--output_dir DIR [flags]\n       " + f"{program} --config FILE [--output_dir DIR] [flags]",
    )  # fmt: skip
    groups = {title: parser.add_argument_group(title) for title in _GROUPS}
    for title, names in _GROUPS.items():
        for name in names:
            _add(groups[title], name)
    groups["Optimisation"].add_argument(
        "--num_epochs",
        metavar="N",
        help="Instead of --steps: how often every sample is seen. Told in steps at the start.",
    )
    run = parser.add_argument_group("Run")
    run.add_argument("--output_dir", metavar="DIR", help="Folder for checkpoints, samples and the adapter. It is made.")
    run.add_argument(
        "--config", metavar="FILE", help="YAML or JSON with the configuration: its own blocks (model, datasets, ...), a "
        "LoRATrainingJob, or an ai-toolkit file as it is. Flags override it.",
    )  # fmt: skip
    run.add_argument("--process", metavar="N", type=int, help="Which process of an ai-toolkit file, from 0.")
    run.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="Any field by its path, see below; lists are written [a, b]. Repeatable.",
    )
    run.add_argument(
        "--run_config", metavar="FILE", help="A run configuration as the operator writes it; no other flag."
    )
    groups["Machine"].add_argument(
        "--nproc_per_node", metavar="N", type=int, default=1, help="Processes, one for each GPU. (default: 1)"
    )
    return parser


def _add(group: Any, name: str) -> None:
    path = FIELDS[name]
    field = field_at(path)
    assert field is not None, path
    options: dict[str, Any] = {"help": _help(name, field).replace("%", "%%"), "metavar": _metavar(name, field)}
    if field.annotation is bool:
        options |= {"nargs": "?", "const": "true"}
    elif name in _REPEATED:
        options |= {"nargs": "+", "action": "extend"}
    group.add_argument(f"--{name}", **options)


def _help(name: str, field: FieldInfo) -> str:
    text = _HELP.get(name, str(field.description))
    text += " Repeatable." if name in _REPEATED else ""
    choices = choices_at(FIELDS[name])
    text += f" One of {', '.join(choices)}." if choices else ""
    if name == "arch":
        return text + " (default: seen from model_index.json)"
    default = "" if field.is_required() else f" (default: {shown_default(field)})"
    return text + default


def choices_at(path: str) -> tuple[str, ...]:
    """The words that the field at a path takes; none for other fields."""
    *parents, last = path.split(".")
    owner: type[BaseModel] | None = TrainerConfig
    for parent in parents:
        assert owner is not None
        owner = model_in(owner.model_fields[parent].annotation)
    return choices_of(owner, last) if owner else ()


def _metavar(name: str, field: FieldInfo) -> str:
    if name in ("base_model", "train_data"):
        return "DIR"
    kinds = {int: "N", float: "X", bool: "true|false"}
    return kinds.get(field.annotation, "TEXT" if name in ("prompt", "trigger_word") else "VALUE")  # type: ignore[arg-type]


def shown_default(field: FieldInfo) -> str:
    """The default as people write it."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value == ():
        return "none"
    if value == "":
        return "empty"
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def settable(model: type[BaseModel] = TrainerConfig, path: str = "") -> Iterator[str]:
    """Paths of all fields that hold a value, such as `train.lr`."""
    for name, field in model.model_fields.items():
        below = f"{path}.{name}".removeprefix(".")
        inner = model_in(field.annotation)
        in_a_list = get_origin(field.annotation) is tuple and name != "datasets"
        if inner is not None and not in_a_list:
            yield from settable(inner, below)
        else:
            yield below


def _settable_help() -> str:
    lines = ["fields for --set, as in --set train.weight_decay=0.01 or --set datasets[0].num_repeats=4:"]
    block = ""
    for path in settable():
        field = field_at(path)
        if path in FIELDS.values() or field is None:
            continue
        if path.partition(".")[0] != block:
            block = path.partition(".")[0]
            lines.append("")
        choices = choices_at(path)
        default = "required" if field.is_required() else f"default: {shown_default(field)}"
        words = f" One of {', '.join(choices)}." if choices else ""
        words += f" Each has {', '.join(inner.model_fields)}." if (inner := model_in(field.annotation)) else ""
        text = f"{field.description}{words} ({default})".removesuffix(" (default: none)")
        lines += [f"  {path}", *textwrap.wrap(text, 78, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines)
