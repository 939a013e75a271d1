"""Locations of models, data and files, as the configuration writes them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field


def _one_line(value: str) -> str:
    if any(ord(character) < 32 for character in value):
        raise ValueError("control characters and line breaks are not allowed")
    return value


Line = Annotated[str, AfterValidator(_one_line)]
Location = Annotated[Line, Field(min_length=1, max_length=1024)]

HUB_PATTERN = r"^hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[^/@]+)?(/.+)?$"


def _hub_form(value: str) -> str:
    if value.startswith("hf://") and not re.match(HUB_PATTERN, value):
        raise ValueError(f"found {value!r}, expected hf://org/repo, hf://org/repo@revision or a file in it")
    return value


ModelLocation = Annotated[Location, AfterValidator(_hub_form)]
