"""What lies beside a result: its configuration, what it was made from, and the report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lora_api.store import Store
from lora_trainer import history
from lora_trainer.history import Line
from lora_trainer.report import Report, RunHistory, page, read_gallery, read_history
from lora_trainer.reporting import Snapshot
from lora_trainer.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told:
    """What this start knows of itself.

    Args:
        start: Its number.
        lines: Its metric lines.
        now: Its numbers.
        stall_seconds: That training stood still for saving.
    """

    start: int
    lines: Sequence[Line]
    now: Snapshot
    stall_seconds: float

    def history(self, store: Store) -> RunHistory:
        """Of all starts together. Raises StoreError."""
        return read_history(store, {**history.read_lines(store, self.start), self.start: self.lines})


def write_records(
    folder: Path,
    facts: Mapping[str, Any],
    settings: Settings,
    *,
    store: Store,
    told: Told,
    drawn: Sequence[Path],
) -> list[Path]:
    """Writes `config.json`, `metadata.yaml` and `report.html`; returns them.

    Args:
        folder: Holds the result's files already.
        facts: Of the run, plain data.
        settings: In force at the end.
        store: The run directory.
        told: What this start knows of itself.
        drawn: The result's samples.

    Raises:
        StoreError: When the store can't be used.
    """
    results = sorted(path for path in folder.rglob("*") if path.is_file() and path not in drawn)
    config = settings.config.model_dump(mode="json")
    files = [folder / "config.json", folder / "metadata.yaml"]
    files[0].write_text(settings.config.model_dump_json(indent=1))
    told_history = told.history(store)
    training = {
        **told_history.facts(),
        "lost_steps": told.now.lost_steps,
        "nonfinite_steps": told.now.nonfinite_steps,
    }
    facts = {**facts, "training": training}
    files[1].write_text(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True))
    try:
        html = page(
            Report(
                facts,
                told_history,
                read_gallery(store, drawn),
                yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
                lost_steps=told.now.lost_steps,
                nonfinite_steps=told.now.nonfinite_steps,
                stall_seconds=told.stall_seconds,
                save_seconds=told.now.save_seconds,
                files=tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in results),
            )
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("no report was written: %s", error, exc_info=error)  # the adapter is worth more than its report
        return files
    (folder / "report.html").write_text(html)
    return [*files, folder / "report.html"]
