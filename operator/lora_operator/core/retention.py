"""Which checkpoints stay. Pure: what is in the run directory in, keys to delete out.

Never deleted: the newest committed checkpoint, the one a running start resumed from until it has committed its own,
anything that no manifest names and is young, anything outside `checkpoints/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from lora_api import layout
from lora_api.run import CheckpointManifest, Progress
from lora_operator.core.views import RunView

_LEFTOVER_AGE = timedelta(hours=1)  # an upload that takes longer than this between two files has died


@dataclass(frozen=True)
class Retention:
    """What to keep and what to delete."""

    kept: tuple[CheckpointManifest, ...]  # the ledger, newest first, one per step
    expired: tuple[CheckpointManifest, ...]
    delete_keys: tuple[tuple[str, ...], ...]  # manifests first, then files: a reader never sees half a checkpoint


def ledger(manifests: tuple[CheckpointManifest, ...]) -> tuple[CheckpointManifest, ...]:
    """Newest first, one per step; of two with the same step the newer start's counts."""
    by_step: dict[int, CheckpointManifest] = {}
    for manifest in sorted(manifests, key=lambda m: (m.step, m.start)):
        by_step[manifest.step] = manifest
    return tuple(sorted(by_step.values(), key=lambda m: m.step, reverse=True))


def plan_retention(run: RunView, max_step_saves: int, now: datetime) -> Retention:
    """Keeps the newest `max_step_saves` checkpoints that passed their integrity check so far."""
    listed = {item.key for item in run.objects}
    there = tuple(m for m in run.manifests if _manifest_key(m) in listed)  # one that lies elsewhere is nobody's
    rejected = _rejected_folders(run.progress)
    newest_first = sorted(there, key=lambda m: (m.step, m.start), reverse=True)
    good = [m for m in ledger(there) if _folder(m) not in rejected]
    kept = good[:max_step_saves] or newest_first[:1]
    kept += [m for m in newest_first if m not in kept and _is_in_use(m, run)]
    expired = tuple(m for m in newest_first if m not in kept and good)
    manifest_keys = tuple(_manifest_key(m) for m in expired)
    batches = (manifest_keys, _files_of(expired, run), _leftovers(run, now))
    return Retention(
        kept=tuple(sorted(kept, key=lambda m: (m.step, m.start), reverse=True)),
        expired=expired,
        delete_keys=tuple(batch for batch in batches if batch),
    )


def without_deletion(retention: Retention) -> Retention:
    """The same directory, with nothing deleted from it."""
    everything = sorted((*retention.kept, *retention.expired), key=lambda m: (m.step, m.start), reverse=True)
    return Retention(kept=tuple(everything), expired=(), delete_keys=())


def _folder(manifest: CheckpointManifest) -> str:
    return layout.checkpoint_folder(manifest.step, manifest.start)


def _manifest_key(manifest: CheckpointManifest) -> str:
    return layout.checkpoint_manifest(manifest.step, manifest.start)


def _rejected_folders(progress: Progress | None) -> set[str]:
    return {item.key.removesuffix(layout.MANIFEST) for item in progress.rejected} if progress else set()


def _is_in_use(manifest: CheckpointManifest, run: RunView) -> bool:
    """Whether the newest start went on from it and has nothing newer of its own yet."""
    progress = run.progress
    if progress is None or progress.exit is not None or progress.resumed_from_step != manifest.step:
        return False
    return not any(m.start == progress.start for m in run.manifests)


def _files_of(expired: tuple[CheckpointManifest, ...], run: RunView) -> tuple[str, ...]:
    """What lies in their folders. Only keys that were listed: what a manifest names may be anything."""
    folders = tuple(_folder(m) for m in expired)
    manifests = {_manifest_key(m) for m in expired}
    return tuple(item.key for item in run.objects if item.key.startswith(folders) and item.key not in manifests)


def _leftovers(run: RunView, now: datetime) -> tuple[str, ...]:
    """Old files of checkpoints that were never committed, or whose deletion was cut short."""
    manifests = [item.key for item in run.objects if layout.is_checkpoint_manifest(item.key)]
    committed = tuple(key.removesuffix(layout.MANIFEST) for key in manifests)  # readable to us or not
    border = (now - _LEFTOVER_AGE).timestamp()
    return tuple(item.key for item in run.objects if item.modified_at < border and not item.key.startswith(committed))
