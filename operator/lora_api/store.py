"""The store of run directories: a Protocol of five verbs, and what its adapters promise.

Adapters live in `lora_api.stores` and are held to one contract suite. Both programs use them: the semantics of the run
directory (what is listed, what is atomic, what an absent key means) must not differ between who writes and who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class StoreError(Exception):
    """The store can't be used right now; trying again may help. The message names store and operation."""


class StoreCredentialsError(StoreError):
    """The store refused the credentials; trying again won't help."""


class StoreMissingError(StoreError):
    """The bucket or directory does not exist; trying again won't help until somebody makes it."""


@dataclass(frozen=True)
class StoredObject:
    """One object: its key relative to the store's root, and its size."""

    key: str
    size_bytes: int
    modified_at: float  # seconds since the epoch, by the store's clock


class Store(Protocol):
    """Blocking; one instance may be used from several threads.

    Keys are relative, with `/` between parts. A `put` is atomic: readers see the old bytes or the new ones, never a part.
    All verbs raise StoreError.
    """

    @property
    def location(self) -> str:
        """Where it is, for people: `s3://bucket/prefix/` or a directory."""
        ...

    def put(self, key: str, data: bytes | memoryview | Path) -> None:
        """Writes bytes (a memoryview counts them singly), or the content of a file."""
        ...

    def get(self, key: str) -> bytes | None:
        """The bytes; None when there is no such key."""
        ...

    def fetch(self, key: str, target: Path) -> bool:
        """Writes the object to a local file; False when there is no such key."""
        ...

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Every object whose key starts with `prefix`, sorted by key. Raises StoreMissingError without bucket."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes exactly these keys; absent ones are fine."""
        ...

    def sub(self, prefix: str) -> Store:
        """The same store, seen from below `prefix` (a slash is put at its end)."""
        ...
