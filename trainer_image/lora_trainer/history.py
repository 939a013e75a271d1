"""What earlier starts of a run have left behind: their metric lines, and the changes made to the run while it ran.

A start that goes on from before a change makes the steps up to it again with the settings that they had then: it ends with
the bits of a run that was never interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.run import Control
from lora_api.store import Store
from lora_trainer.settings import Settings

Line = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A control document that took effect after `step` updates."""

    step: int
    control: Control


def read_lines(store: Store, before_start: int | None = None) -> dict[int, list[Line]]:
    """Metric lines by start, in the order of starts; what is not readable is left out.

    Args:
        store: The run directory.
        before_start: Only of earlier starts.

    Raises:
        StoreError: When the store can't be used.
    """
    found: dict[int, list[Line]] = {}
    for item in store.list(layout.METRICS):
        name = item.key.removeprefix(layout.METRICS).removesuffix(".jsonl")
        if name.isdigit() and (before_start is None or int(name) < before_start):
            found[int(name)] = parse_lines(store.get(item.key) or b"")
    return dict(sorted(found.items()))


def parse_lines(data: bytes) -> list[Line]:
    """The metric lines in a file; a line that is cut off is left out."""
    lines = []
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def changes_in(lines: Mapping[int, Sequence[Line]]) -> tuple[Change, ...]:
    """The changes that starts have told of; of one generation the newest start's."""
    found: dict[int, Change] = {}
    for of_start in lines.values():
        for line in of_start:
            if "control" in line:
                try:
                    change = Change(int(line["step"]), Control.model_validate(line["control"]))
                except (ValueError, KeyError, TypeError):
                    continue
                found[change.control.generation] = change
    return tuple(sorted(found.values(), key=lambda each: (each.step, each.control.generation)))


def recorded_control(state: bytes, config: TrainerConfig) -> Control | None:
    """The settings that a checkpoint was made with, from its state file; None where it does not say."""
    try:
        record = json.loads(state)["control"]
        return Control.model_validate({"max_step_saves": config.save.max_step_saves, **record})
    except (ValueError, KeyError, TypeError):
        return None


def settings_at(
    config: TrainerConfig,
    newest: Control | None,
    recorded: Control | None,
    changes: Sequence[Change],
    step: int,
) -> tuple[Settings, tuple[Change, ...]]:
    """The settings to go on with after `step` updates, and the changes that come again at their own steps.

    Whatever nobody saw taking effect holds at once.

    Args:
        config: Of the run.
        newest: `control.json`.
        recorded: What the checkpoint was made with.
        changes: That earlier starts have told of.
        step: Of the checkpoint.
    """
    if newest is None or recorded is None:
        return Settings.of(config, newest), ()
    news = [each for each in changes if recorded.generation < each.control.generation <= newest.generation]
    if not any(each.control.generation == newest.generation for each in news):
        return Settings.of(config, newest), ()
    told, settings = _in_force(news), Settings.of(config, recorded)
    for each in told:
        if each.step <= step:  # a checkpoint is made before the change that comes with its step
            settings = settings.taking(each.control)
    return settings, tuple(each for each in told if each.step > step)


def _in_force(changes: Sequence[Change]) -> list[Change]:
    """Changes in the order of their steps without those that a newer one came before: a start took them, the next one did not."""
    found: list[Change] = []
    for each in changes:
        if not found or each.control.generation > found[-1].control.generation:
            found.append(each)
    return found
