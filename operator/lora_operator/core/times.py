"""RFC 3339 in and out, and durations for people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def parse_time(text: str | None) -> datetime | None:
    """`2026-01-31T12:00:00Z` or with microseconds or offset; None for None and for what is not a time."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


def format_time(moment: datetime, *, round_up: bool = False) -> str:
    """Whole seconds in UTC, as Kubernetes writes `metav1.Time`; the second before, or the one after."""
    if round_up and moment.microsecond:
        moment += timedelta(seconds=1)
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_duration(seconds: float) -> str:
    """The two leading units: `45s`, `3m05s`, `1h12m`, `2d03h`."""
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{secs:02d}s"
    return f"{secs}s"


def format_bytes(size_bytes: int) -> str:
    """`812 B`, `1.4 MB`: decimal units, as object stores bill."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
