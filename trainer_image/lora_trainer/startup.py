"""Where the time between a process's claim and its first step went. Pure: time is an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COUNTER = re.compile(r"\s*\d+/\d+.*|\s*\(.*|: .*")


class Phases:
    """Adds up the seconds of what is done one after the other, by name, until the first step.

    Args:
        now: Seconds on any clock that only goes forward; the first phase begins here.
    """

    def __init__(self, now: float) -> None:
        self._name, self._since, self._open = "starting", now, True
        self._seconds: dict[str, float] = {}

    def enter(self, text: str, now: float) -> None:
        """What is done from now on.

        Args:
            text: As people read it; counters are no part of the name: `encoding 3/12 pictures` and `encoding 4/12
                pictures` are one phase. Empty text changes nothing.
            now: As above.
        """
        name = _COUNTER.sub("", text).strip()
        if self._open and name and name != self._name:
            self._end(now)
            self._name = name

    def close(self, now: float) -> dict[str, float]:
        """Seconds by phase, in the order of their beginnings; later calls of `enter` change nothing."""
        if self._open:
            self._end(now)
            self._open = False
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    def _end(self, now: float) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._since = now


def describe(seconds: Mapping[str, float], least: float = 0.05) -> str:
    """One line for people, such as `importing libraries 3.1 s, loading the base model 0.4 s`; phases below `least` are left out."""
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value >= least)
