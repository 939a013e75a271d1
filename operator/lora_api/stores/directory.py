"""A local directory as a store: what `lora-operator run` writes to without a cluster."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from lora_api.store import StoredObject, StoreError

_PARTIAL = ".partial-"  # files with this prefix are writes that did not finish; they are never listed


class DirectoryStore:
    """See `lora_api.store.Store`. Keys are paths below `root`; writes go through a temporary file and a rename."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._root)

    def put(self, key: str, data: bytes | memoryview | Path) -> None:
        """Writes bytes, or the content of a file; durable (fsync) before it becomes visible."""
        target = self._path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            name = target.parent / f"{_PARTIAL}{uuid.uuid4().hex}"
            try:
                with name.open("xb") as out:  # not mkstemp: results are as readable as the user's other files
                    if isinstance(data, Path):
                        with data.open("rb") as source:
                            shutil.copyfileobj(source, out, 1 << 20)
                    else:
                        out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                name.replace(target)
            except BaseException:
                name.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise StoreError(f"{target}: can't be written: {error.strerror or error}") from error

    def get(self, key: str) -> bytes | None:
        """The bytes; None when there is no such key."""
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self._path(key)}: can't be read: {error.strerror or error}") from error

    def fetch(self, key: str, target: Path) -> bool:
        """Copies the object to a local file; False when there is no such key."""
        source = self._path(key)
        if not source.is_file():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise StoreError(f"{source}: can't be copied to {target}: {error.strerror or error}") from error
        return True

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Every file whose key starts with `prefix`, sorted; an absent directory is an empty store."""
        folder = self._path(prefix.rpartition("/")[0]) if "/" in prefix else self._root
        found = []
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for name in files:
                path = Path(parent, name)
                key = path.relative_to(self._root).as_posix()
                if name.startswith(_PARTIAL) or not key.startswith(prefix):
                    continue
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue  # deleted while we looked
                found.append(StoredObject(key, stat.st_size, stat.st_mtime))
        return sorted(found, key=lambda item: item.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes the files, and folders that became empty, up to the root."""
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"{path}: can't be removed: {error.strerror or error}") from error
            for parent in path.parents:
                if parent == self._root or not parent.is_relative_to(self._root):
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break  # not empty, or gone

    def sub(self, prefix: str) -> DirectoryStore:
        """The same store, seen from below `prefix`."""
        return DirectoryStore(self._path(prefix))

    def _path(self, key: str) -> Path:
        if ".." in key.split("/") or key.startswith("/"):
            raise ValueError(f"{key!r} leaves the store")
        return self._root / key
