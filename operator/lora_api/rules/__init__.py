"""What the parts of a configuration ask of each other: one pure function per rule, each returns the problem or None.

A problem begins with the path of the field that is wrong, below `config`, and says what was found and what to write. `cel`
says the same to the API server; tests/unit/test_crd.py holds them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from lora_api import parallelism
from lora_api.rules import general, objective, optimization, order

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig

Rule: TypeAlias = "Callable[[TrainerConfig], str | None]"

RULES: tuple[Rule, ...] = (
    *general.RULES,
    *optimization.RULES,
    *objective.RULES,
    *order.RULES,
    *parallelism.RULES,
)
"""In the order in which they are asked; the first problem is reported."""
