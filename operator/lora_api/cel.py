"""What the API server checks beyond types: CEL rules, each the twin of a validator in the pydantic types.

A rule lies on the object whose fields it reads and names the field it speaks of; its message says what was found and what
was expected. `tests/integration/test_crd_validation.py` gives the same bad manifests to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_api.config import CUSTOM_PREFIX, MUTABLE_CONFIG_PATHS, TEXT_ENCODER_ARCHS, Arch
from lora_api.patterns import CUSTOM_ARCH
from lora_api.schema import ITEMS, Path, Schema, at

MUTABLE_SPEC_PATHS: tuple[Path, ...] = (
    ("runPolicy",),
    ("output", "deletionPolicy"),
    *(("config", *path) for path in MUTABLE_CONFIG_PATHS),
)
"""Paths below `spec` of a job that may change at any time; everything else is fixed when the job is created."""


@dataclass(frozen=True)
class Rule:
    """One entry of `x-kubernetes-validations`.

    Attributes:
        on: The node that carries it, from the root of the object.
        rule: The expression that must hold.
        message: Said when there is no `message_expression`, or it can't be evaluated.
        message_expression: CEL for a message with the values found.
        field: The field it speaks of, below `on`.
        reason: How the server classes the refusal.
    """

    on: Path
    rule: str
    message: str
    message_expression: str | None = None
    field: str | None = None
    reason: str | None = None

    def manifest(self) -> Schema:
        """As the API server reads it."""
        entries = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.message_expression,
            "fieldPath": f".{self.field}" if self.field else None,
            "reason": self.reason,
        }
        return {key: value for key, value in entries.items() if value is not None}


def _listed(values: tuple[str, ...]) -> str:
    """A list of strings in CEL."""
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


JOB_RULES: tuple[Rule, ...] = (
    Rule(
        on=("spec", "config", "model"),
        rule=f'self.arch in {_listed(tuple(Arch))} || self.arch.matches("^{CUSTOM_ARCH}$")',
        message=f"is not one of {', '.join(Arch)}, {CUSTOM_PREFIX}... of a family that you added",
        field="arch",
        reason="FieldValueInvalid",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.train_unet || self.train_text_encoder",
        message="false, and train_text_encoder is false too, so nothing would be trained; set one to true",
        field="train_unet",
    ),
    Rule(
        on=("spec", "config"),
        rule=f"!self.train.train_text_encoder || self.model.arch in {_listed(TEXT_ENCODER_ARCHS)}"
        f' || self.model.arch.startsWith("{CUSTOM_PREFIX}")',
        message="true is not supported; set it to false",
        message_expression='"true is not supported for model.arch " + self.model.arch + "; set it to false"',
        field="train.train_text_encoder",
    ),
    Rule(
        on=("spec", "config"),
        rule='!self.train.train_text_encoder || self.network.type == "lora"',
        message="lokr can't be used with train_text_encoder: true, diffusers loads only LoRA into text encoders; set it to lora",
        field="network.type",
    ),
    Rule(
        on=("spec", "config", "network"),
        rule="self.lokr_factor != 0",
        message="0 is neither -1 (most even split) nor a factor of at least 1",
        field="lokr_factor",
    ),
    Rule(
        on=("spec", "output", "path"),
        rule='!self.matches("(^|/)[.]+(/|$)")',
        message="has a segment of dots only",
    ),
)

PROFILE_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            on=("spec", "stores", ITEMS),
            rule=f'self.type != "{kind}" || has(self.{field})',
            message=f"required for a store of type {kind}",
            field=field,
            reason="FieldValueRequired",
        )
        for kind, field in (("s3", "endpoint"), ("s3", "bucket"), ("directory", "directory"))
    ),
)


def immutable(crd_schema: Schema) -> Iterator[Rule]:
    """One rule for each field of a job's spec that is fixed, on its parent, so that adding and removing it is caught too.

    Lists are compared whole: their items have no identity that a rule could follow.
    """
    yield from _immutable(at(crd_schema, ("spec",)), ())


def _immutable(node: Schema, below_spec: Path) -> Iterator[Rule]:
    for name, child in node["properties"].items():
        path = (*below_spec, name)
        if path in MUTABLE_SPEC_PATHS:
            continue
        always_there = name in node.get("required", ()) or "default" in child
        if child["type"] == "object":
            assert always_there, f"spec.{'.'.join(path)}: a transition rule inside it would not see it come and go"
            yield from _immutable(child, path)
        else:
            yield _fixed(("spec", *below_spec), name, child["type"], always_there=always_there)


def _fixed(parent: Path, name: str, kind: str, *, always_there: bool) -> Rule:
    same = f"self.{name} == oldSelf.{name}"
    advice = "what defines the run is fixed once the job exists; create a new job"
    if not always_there:
        same = f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {same})"
    said = None
    if kind != "array":
        values = ", ".join(_shown(whose, name, always_there=always_there) for whose in ("self", "oldSelf"))
        said = f'"found %s, but the job was created with %s; {advice}".format([{values}])'
    return Rule(
        parent, same, f"differs from what the job was created with; {advice}", said, name, "FieldValueForbidden"
    )


def _shown(whose: str, name: str, *, always_there: bool) -> str:
    """The value in words. `format` takes any type, and unlike `+` its cost is not estimated from unbounded strings."""
    return f"{whose}.{name}" if always_there else f'has({whose}.{name}) ? string({whose}.{name}) : "unset"'


def attach(crd_schema: Schema, rules: Iterator[Rule] | tuple[Rule, ...]) -> None:
    """Puts each rule on its node, after those that are there."""
    for rule in rules:
        at(crd_schema, rule.on).setdefault("x-kubernetes-validations", []).append(rule.manifest())
