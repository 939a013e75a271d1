"""The run directory as a view. Manifests never change once written, so each is read once and remembered."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lora_api import layout
from lora_api.run import CheckpointManifest, Control, FinalManifest, Progress, RunFile
from lora_api.store import Store, StoreError
from lora_operator.core.views import RunView

Document = TypeVar("Document", bound=BaseModel)
_REMEMBERED = 4096


class RunDirectories:
    """Reads run directories. Blocking: call it in a thread."""

    def __init__(self) -> None:
        self._manifests: OrderedDict[tuple[str, str, int, float], CheckpointManifest | None] = OrderedDict()

    def observe(self, store: Store) -> RunView:
        """What the run directory `store` (seen from below its prefix) holds. Raises StoreError."""
        owner = _read(store, layout.RUN_FILE, RunFile)
        objects = store.list(layout.CHECKPOINTS)
        location = store.location.rstrip("/") + "/"
        if owner is None and not objects:  # nobody has begun: run.json is what a first start writes first
            return RunView(location=location)
        manifests = []
        for item in objects:
            if layout.is_checkpoint_manifest(item.key):
                manifest = self._manifest(store, item.key, item.size_bytes, item.modified_at)
                if manifest is not None:
                    manifests.append(manifest)
        return RunView(
            location=location,
            owner=owner,
            progress=_read(store, layout.PROGRESS, Progress),
            manifests=tuple(manifests),
            objects=tuple(objects),
            final=_read(store, layout.FINAL_MANIFEST, FinalManifest),
            control=_read(store, layout.CONTROL, Control),
        )

    def _manifest(self, store: Store, key: str, size_bytes: int, modified_at: float) -> CheckpointManifest | None:
        identity = (store.location, key, size_bytes, modified_at)
        if identity not in self._manifests:
            self._manifests[identity] = _read(store, key, CheckpointManifest)
            while len(self._manifests) > _REMEMBERED:
                self._manifests.popitem(last=False)
        return self._manifests[identity]


def delete_everything(store: Store) -> None:
    """Removes a whole run directory, what commits it first. Blocking. Raises StoreError."""
    keys = [item.key for item in store.list()]
    first = [key for key in keys if key.endswith(layout.MANIFEST)]
    owner = [key for key in keys if key == layout.RUN_FILE]
    rest = [key for key in keys if key not in set(first) | set(owner)]
    for batch in (first, rest, owner):  # whose directory it is stays known until the end
        if batch:
            store.delete(batch)


def _read(store: Store, key: str, kind: type[Document]) -> Document | None:
    """The document; None when it is not there or not (yet) readable as one."""
    data = store.get(key)
    if data is None:
        return None
    try:
        return kind.model_validate_json(data)
    except ValidationError:
        return None


__all__ = ["RunDirectories", "StoreError", "delete_everything"]
