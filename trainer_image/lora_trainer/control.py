"""Watching `control.json` in the background, so that reading the store never delays a step."""

from __future__ import annotations

import logging
import threading

from lora_api import layout
from lora_api.run import Control
from lora_api.store import Store, StoreError
from lora_trainer.retry import place

log = logging.getLogger(__name__)

POLL_SECONDS = 3.0


def read_control(store: Store) -> Control | None:
    """The control document, None when there is none or it can't be parsed (which is logged).

    Raises:
        StoreError: When the store can't be used.
    """
    raw = store.get(layout.CONTROL)
    if raw is None:
        return None
    try:
        return Control.model_validate_json(raw)
    except ValueError as error:
        log.warning("%s is ignored: %s", place(store, layout.CONTROL), error)
        return None


class ControlWatch:
    """Reads the control document every few seconds; the loop asks `newer_than` at the end of each step."""

    def __init__(self, store: Store, poll_seconds: float = POLL_SECONDS) -> None:
        self._store, self._poll_seconds = store, poll_seconds
        self._newest: Control | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def newer_than(self, generation: int) -> Control | None:
        """The newest document seen, if its generation is above `generation`."""
        newest = self._newest
        return newest if newest is not None and newest.generation > generation else None

    def close(self) -> None:
        """Stops watching; doesn't wait."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            try:
                self._newest = read_control(self._store) or self._newest
            except StoreError as error:
                log.debug("control document: %s", error)
