"""One CEL rule of a CRD."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lora_api.schema import Path, Schema


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


def listed(values: Iterable[str]) -> str:
    """A list of strings in CEL."""
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"
