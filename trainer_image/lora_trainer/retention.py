"""Removes old checkpoints where no operator does: in runs begun on the command line.

The newest committed checkpoint always stays. A checkpoint's manifest goes before its files, so that no reader finds half
of one.
"""

from __future__ import annotations

import logging

from lora_api import layout
from lora_api.run import CheckpointManifest
from lora_api.store import Store, StoreError

log = logging.getLogger(__name__)


def remove_old_checkpoints(store: Store, keep: int) -> int:
    """Keeps the newest `keep` steps; returns how many checkpoints it removed. A store that fails is logged, no more.

    Args:
        store: The run directory.
        keep: At least 1.
    """
    try:
        folders = expired_folders(store, keep)
        if folders:
            keys = [item.key for item in store.list(layout.CHECKPOINTS) if item.key.startswith(folders)]
            store.delete(sorted(keys, key=lambda key: not layout.is_checkpoint_manifest(key)))
    except StoreError as error:
        log.warning("old checkpoints could not be removed, training goes on: %s", error)
        return 0
    return len(folders)


def expired_folders(store: Store, keep: int) -> tuple[str, ...]:
    """Folders of committed checkpoints beyond the newest `keep` steps; of two with one step the newer start's stays."""
    found: list[tuple[int, int]] = []
    for item in store.list(layout.CHECKPOINTS):
        raw = store.get(item.key) if layout.is_checkpoint_manifest(item.key) else None
        if raw is None:
            continue
        try:
            manifest = CheckpointManifest.model_validate_json(raw)
        except ValueError:
            continue  # not ours to judge
        if item.key == layout.checkpoint_manifest(manifest.step, manifest.start):
            found.append((manifest.step, manifest.start))
    newest = {step: max(start for other, start in found if other == step) for step, _ in found}
    kept = sorted(newest.items(), reverse=True)[: max(1, keep)]
    return tuple(layout.checkpoint_folder(*each) for each in found if each not in kept)
