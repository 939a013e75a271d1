"""A store that is asked again a few times before it counts as away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lora_api.store import Store, StoreCredentialsError, StoredObject, StoreError, StoreMissingError

log = logging.getLogger(__name__)
Result = TypeVar("Result")

WAITS_SECONDS = (0.5, 1.0, 2.0, 4.0)


def place(store: Store, key: str) -> str:
    """Where a key is, for people."""
    return f"{store.location.rstrip('/')}/{key}"


class RetryingStore:
    """See `lora_api.store.Store`. Refused credentials and a missing bucket are not tried again."""

    def __init__(
        self, store: Store, waits_seconds: Sequence[float] = WAITS_SECONDS, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._store, self._waits, self._sleep = store, tuple(waits_seconds), sleep

    @property
    def location(self) -> str:
        """Where it is, for people."""
        return self._store.location

    def put(self, key: str, data: bytes | memoryview | Path) -> None:
        """Writes bytes, or the content of a file."""
        self._again(lambda: self._store.put(key, data))

    def get(self, key: str) -> bytes | None:
        """The bytes; None when there is no such key."""
        return self._again(lambda: self._store.get(key))

    def fetch(self, key: str, target: Path) -> bool:
        """Writes the object to a local file; False when there is no such key."""
        return self._again(lambda: self._store.fetch(key, target))

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Every object whose key starts with `prefix`, sorted by key."""
        return self._again(lambda: self._store.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Removes exactly these keys."""
        self._again(lambda: self._store.delete(keys))

    def sub(self, prefix: str) -> Store:
        """The same store, seen from below `prefix`."""
        return RetryingStore(self._store.sub(prefix), self._waits, self._sleep)

    def _again(self, call: Callable[[], Result]) -> Result:
        for wait in self._waits:
            try:
                return call()
            except (StoreCredentialsError, StoreMissingError):
                raise
            except StoreError as error:
                log.warning("%s; trying again in %g s", error, wait)
                self._sleep(wait)
        return call()
