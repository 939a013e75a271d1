"""What the report of a run is made from, gathered from the run directory."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_api import layout
from lora_api.run import CheckpointManifest, StartClaim
from lora_api.store import Store
from lora_trainer.data.samples import Sample
from lora_trainer.history import Change, Line, changes_in


@dataclass(frozen=True)
class StartFacts:
    """One start of the run."""

    start: int
    attempt: int
    claimed_at: str
    host: str
    first_step: int | None  # that it logged; None where it trained nothing
    last_step: int | None


@dataclass(frozen=True)
class RunHistory:
    """All starts of a run together.

    Args:
        steps: One metric line for each logged step, that of the newest start.
        starts: In order.
        changes: Of settings, by control documents.
        checkpoints: Those that are kept, the newest first.
        stages: After which step which stage of `train.stages` began, but for the first.
    """

    steps: tuple[Line, ...]
    starts: tuple[StartFacts, ...]
    changes: tuple[Change, ...]
    checkpoints: tuple[CheckpointManifest, ...]
    stages: tuple[tuple[int, int], ...] = ()

    @property
    def seconds_per_step(self) -> float | None:
        """Median over all logged steps."""
        return statistics.median(line["seconds"] for line in self.steps) if self.steps else None

    @property
    def samples_per_second(self) -> float | None:
        """At the median speed."""
        if not self.steps or not self.seconds_per_step:
            return None
        last = self.steps[-1]
        return float(last["samples"] / last["step"] / self.seconds_per_step)

    def facts(self) -> dict[str, Any]:
        """The same in a few numbers."""
        last = [line["loss"] for line in self.steps[-100:]]
        return {
            "started_at": self.starts[0].claimed_at if self.starts else "",
            "starts": len(self.starts),
            "seconds_per_step": _short(self.seconds_per_step),
            "samples_per_second": _short(self.samples_per_second),
            "loss_of_last_steps": _short(statistics.fmean(last) if last else None),
            "changes": [
                {
                    "after_step": each.step,
                    "generation": each.control.generation,
                    "steps": each.control.steps,
                    "lr": each.control.lr,
                }
                for each in self.changes
            ],
        }


def read_history(store: Store, lines: Mapping[int, Sequence[Line]]) -> RunHistory:
    """The history of a run.

    Args:
        store: The run directory.
        lines: Metric lines by start, those of the present one too.

    Raises:
        StoreError: When the store can't be used.
    """
    steps = {line["step"]: line for of_start in lines.values() for line in of_start if "loss" in line}
    starts = []
    for item in store.list(layout.STARTS):
        try:
            claim = StartClaim.model_validate_json(store.get(item.key) or b"")
        except ValueError:
            continue
        logged = [line["step"] for line in lines.get(claim.start, ()) if "loss" in line]
        starts.append(
            StartFacts(
                claim.start,
                claim.attempt,
                claim.claimed_at,
                claim.host,
                min(logged, default=None),
                max(logged, default=None),
            )
        )
    return RunHistory(
        tuple(steps[step] for step in sorted(steps)),
        tuple(sorted(starts, key=lambda each: each.start)),
        changes_in(lines),
        _checkpoints(store),
        tuple(
            sorted(
                {(line["step"], line["stage"]) for of_start in lines.values() for line in of_start if "stage" in line}
            )
        ),
    )


def _checkpoints(store: Store) -> tuple[CheckpointManifest, ...]:
    found = []
    for item in store.list(layout.CHECKPOINTS):
        if layout.is_checkpoint_manifest(item.key):
            try:
                found.append(CheckpointManifest.model_validate_json(store.get(item.key) or b""))
            except ValueError:
                continue
    return tuple(sorted(found, key=lambda each: (each.step, each.start), reverse=True))


def dataset_facts(samples: Sequence[Sample], trigger_word: str | None) -> dict[str, Any]:
    """What was trained on, in numbers."""
    captions = {(each.sha256, each.caption) for each in samples}
    words = [len(text.split()) for _, text in captions]
    buckets = Counter(f"{each.bucket}x{len(each.frames)}" if each.frames else str(each.bucket) for each in samples)
    found: dict[str, Any] = {
        "files": len({each.sha256 for each in samples}),
        "samples": len(samples),
        "buckets": dict(sorted(buckets.items())),
        "captioned": sum(bool(each.caption) for each in samples),
        "words_per_caption": round(statistics.fmean(words), 1) if words else 0,
        "caption_dropout": sorted({each.dropout for each in samples}),
    }
    if trigger_word:
        found["with_trigger_word"] = sum(trigger_word in each.caption for each in samples)
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
