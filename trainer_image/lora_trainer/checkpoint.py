"""Checkpoints in the store: committing, finding the newest that can be trusted. Knows bytes, not tensors.

Commit order: the files, the claim read again, the manifest. Readers look for manifests only, so a checkpoint exists
whole or not at all.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from lora_api import layout
from lora_api.run import CheckpointManifest, FileEntry, RejectedCheckpoint
from lora_api.store import Store
from lora_trainer import clock
from lora_trainer.errors import CheckpointIntegrityError
from lora_trainer.fence import Fence

log = logging.getLogger(__name__)

ADAPTER, OPTIMIZER, STATE = "adapter.safetensors", "optimizer.safetensors", "state.json"
TRAINING = "training.safetensors"  # only where the adapter's file holds an average: what training goes on with
NAMES = (ADAPTER, OPTIMIZER, STATE)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose files were read and agree with its manifest."""

    manifest_key: str
    manifest: CheckpointManifest
    files: Mapping[str, bytes]


def entry(name: str, data: bytes | memoryview) -> FileEntry:
    """The manifest's line for a file."""
    return FileEntry(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def commit(
    store: Store,
    fence: Fence,
    files: Mapping[str, bytes | memoryview],
    *,
    step: int,
    uid: str,
    config_hash: str,
    begun: float | None = None,
) -> CheckpointManifest:
    """Writes the files, then makes them a checkpoint.

    Args:
        store: The run directory.
        fence: The claim, read again between the files and the manifest.
        files: Content by name.
        step: Updates done.
        uid: Of the job.
        config_hash: Of its configuration.
        begun: When saving began, by `clock.seconds()`; None is now.

    Raises:
        FencedError: When a newer start exists; nothing is committed then.
        StoreError: When the store can't be used.
    """
    begun = clock.seconds() if begun is None else begun
    folder = layout.checkpoint_folder(step, fence.claim.start)
    for name, data in files.items():
        store.put(folder + name, data)
    fence.check()
    manifest = CheckpointManifest(
        step=step,
        start=fence.claim.start,
        attempt=fence.claim.attempt,
        uid=uid,
        config_hash=config_hash,
        committed_at=clock.now(),
        files=tuple(entry(name, data) for name, data in files.items()),
        save_seconds=round(clock.seconds() - begun, 3),
    )
    store.put(folder + layout.MANIFEST, manifest.model_dump_json(by_alias=True).encode())
    return manifest


def newest(store: Store) -> tuple[Checkpoint | None, tuple[RejectedCheckpoint, ...]]:
    """The newest checkpoint that can be trusted, and the newer ones that can't.

    Newest is the highest step; of one step, the highest start.

    Raises:
        CheckpointIntegrityError: When checkpoints were committed but none can be trusted.
        StoreError: When the store can't be used.
    """
    sizes = {item.key: item.size_bytes for item in store.list(layout.CHECKPOINTS)}
    rejected: list[RejectedCheckpoint] = []
    manifests: list[tuple[str, CheckpointManifest]] = []
    for key in filter(layout.is_checkpoint_manifest, sizes):
        raw = store.get(key)
        if raw is None:
            continue  # deleted since it was listed
        try:
            manifests.append((key, CheckpointManifest.model_validate_json(raw)))
        except ValueError:
            rejected.append(RejectedCheckpoint(key=key, step=0, reason="its manifest is not readable"))
    for key, manifest in sorted(manifests, key=lambda pair: (pair[1].step, pair[1].start), reverse=True):
        found = read(store, key, manifest, sizes)
        if isinstance(found, Checkpoint):
            return found, tuple(rejected)
        log.error("checkpoint %s can't be trusted: %s", key, found)
        rejected.append(RejectedCheckpoint(key=key, step=manifest.step, reason=found))
    if rejected:
        lines = "; ".join(f"{item.key}: {item.reason}" for item in rejected)
        raise CheckpointIntegrityError(
            f"{store.location}: none of {len(rejected)} committed checkpoints can be trusted ({lines}); "
            "restore one of them, or remove their manifests to begin again at step 0"
        )
    return None, ()


def read(
    store: Store, key: str, manifest: CheckpointManifest, sizes: Mapping[str, int] | None = None
) -> Checkpoint | str:
    """A checkpoint's files, or what is wrong with them.

    Args:
        store: The run directory.
        key: Of the manifest.
        manifest: Its content.
        sizes: Sizes in bytes by key, where the store was listed already: files of a wrong size are not read at all.
    """
    folder = key.removesuffix(layout.MANIFEST)
    missing = sorted(set(NAMES) - {file.name for file in manifest.files})
    if missing:
        return f"its manifest does not name {', '.join(missing)}"
    files: dict[str, bytes] = {}
    for file in manifest.files:
        size = None if sizes is None else sizes.get(folder + file.name)
        data = None if sizes is not None and size != file.size_bytes else store.get(folder + file.name)
        size = len(data) if data is not None else size
        if size is None:
            return f"{file.name} is missing"
        if data is None or size != file.size_bytes:
            return f"{file.name} has {size} bytes, {file.size_bytes} were committed"
        if hashlib.sha256(data).hexdigest() != file.sha256:
            return f"{file.name} does not have the committed sha256"
        files[file.name] = data
    return Checkpoint(key, manifest, files)
