"""The fence: each start claims the next number, and the highest number alone may write.

A pod that should be dead (an unreachable node, a suspended cgroup) finds the newer claim before its next commit and stops.
"""

from __future__ import annotations

import secrets
import socket

from lora_api import layout
from lora_api.run import StartClaim
from lora_api.store import Store
from lora_trainer import clock
from lora_trainer.errors import FencedError, TransientError

_MAX_TRIES = 20


class Fence:
    """The claim of this start on the run directory."""

    def __init__(self, store: Store, claim: StartClaim) -> None:
        self._store = store
        self.claim = claim

    @classmethod
    def raise_up(cls, store: Store, attempt: int) -> Fence:
        """Claims the next start number.

        The store has no conditional write, so a claim is read back: of two claimants of one number the last writer
        keeps it and the other takes the next.

        Raises:
            StoreError: When the store can't be used.
            TransientError: When other claimants kept coming first.
        """
        token = secrets.token_hex(8)
        for _ in range(_MAX_TRIES):
            number = newest_start(store) + 1
            claim = StartClaim(
                start=number, attempt=attempt, token=token, claimed_at=clock.now(), host=socket.gethostname()
            )
            store.put(layout.start_claim(number), claim.model_dump_json(by_alias=True).encode())
            if _token_of(store, number) == token:
                return cls(store, claim)
        raise TransientError(
            f"{store.location}: could not claim a start in {_MAX_TRIES} tries; others kept coming first"
        )

    def check(self) -> None:
        """Reads the claims again.

        Raises:
            FencedError: When a newer start exists.
            StoreError: When the store can't be used.
        """
        newest = newest_start(self._store)
        if newest > self.claim.start or _token_of(self._store, self.claim.start) != self.claim.token:
            raise FencedError(
                f"start {max(newest, self.claim.start)} has taken over {self._store.location}; "
                f"start {self.claim.start} (attempt {self.claim.attempt}) writes nothing more"
            )


def newest_start(store: Store) -> int:
    """The highest start number that was ever claimed; 0 before the first."""
    numbers = [item.key.removeprefix(layout.STARTS).removesuffix(".json") for item in store.list(layout.STARTS)]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _token_of(store: Store, number: int) -> str:
    raw = store.get(layout.start_claim(number))
    try:
        return StartClaim.model_validate_json(raw).token if raw is not None else ""
    except ValueError:
        return ""
