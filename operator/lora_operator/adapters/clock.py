"""The one place that reads the clock."""

from __future__ import annotations

from datetime import UTC, datetime


class SystemClock:
    """The machine's clock, in UTC."""

    def now(self) -> datetime:
        """The current time."""
        return datetime.now(UTC)  # noqa: TID251 - the one allowed reading
