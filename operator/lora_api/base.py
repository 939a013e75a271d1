"""What all contract types share: frozen, strict about unknown keys, one spelling on the wire."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Native(BaseModel):
    """A type whose keys are written as they stand (snake_case): the trainer's own configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Kubernetes(BaseModel):
    """A type whose keys are camelCase on the wire, as the Kubernetes API conventions ask."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class Document(BaseModel):
    """A JSON document in the run directory; readers skip keys that a newer writer added."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )
