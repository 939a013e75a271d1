"""Opens stores with the credentials of whoever runs the command."""

from __future__ import annotations

from lora_api.profile import StoreSpec
from lora_api.store import Store
from lora_api.stores import Credentials, open_store


class LocalStores:
    """See `lora_operator.ports.Stores`."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials

    async def open(self, spec: StoreSpec) -> Store:
        """The store; an S3 store takes the credentials of the environment."""
        return open_store(spec, self._credentials)
