"""The trainer's one reader of the clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> str:
    """The time as RFC 3339 in UTC, to the second: what the run directory's documents carry."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: TID251 - this module is the clock


def seconds() -> float:
    """Seconds on a clock that never jumps; only differences mean something."""
    return time.monotonic()
