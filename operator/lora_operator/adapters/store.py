"""Opens stores with the credentials in the operator's own Secrets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from lora_api.profile import StoreSpec
from lora_api.store import Store, StoreCredentialsError, StoreError
from lora_api.stores import ACCESS_KEY, SECRET_KEY, Credentials, open_store
from lora_operator.ports import Clock, ClusterError

_TRUSTED_FOR = timedelta(seconds=60)  # a rotated Secret is taken over within this time

_MOST_OPENED = 64


class SecretReader(Protocol):
    """The part of a cluster that is needed here."""

    async def read_secret(self, namespace: str, name: str) -> dict[str, bytes] | None:
        """The decoded values of a Secret; None when there is none."""
        ...


@dataclass(frozen=True)
class _Opened:
    credentials: Credentials | None
    store: Store


class SecretStores:
    """See `lora_operator.ports.Stores`. One client, with its connections, for each different store."""

    def __init__(
        self,
        secrets: SecretReader,
        clock: Clock,
        *,
        operator_namespace: str,
        opener: Callable[[StoreSpec, Credentials | None], Store] = open_store,
    ) -> None:
        self._secrets = secrets
        self._clock = clock
        self._namespace = operator_namespace
        self._opener = opener
        self._credentials: dict[str, tuple[datetime, Credentials]] = {}
        self._opened: dict[StoreSpec, _Opened] = {}

    async def open(self, spec: StoreSpec) -> Store:
        """The store.

        Raises:
            StoreCredentialsError: When the Secret or one of its keys is missing; it names both.
            StoreError: When the Secret can't be read now.
        """
        credentials = await self._credentials_of(spec) if spec.type == "s3" else None
        opened = self._opened.get(spec)
        if opened is None or opened.credentials != credentials:
            if len(self._opened) >= _MOST_OPENED:  # of profiles as they once were
                self._opened.clear()
            opened = self._opened[spec] = _Opened(credentials, self._opener(spec, credentials))
        return opened.store

    async def _credentials_of(self, spec: StoreSpec) -> Credentials:
        name = spec.credentials.operator_secret_name
        if name is None:
            raise StoreCredentialsError(
                f"store {spec.name!r}: the profile names no credentials.operatorSecretName, so the operator can't read {spec.endpoint}"
            )
        now = self._clock.now()
        known = self._credentials.get(name)
        if known is not None and known[0] > now:
            return known[1]
        credentials = await self._read(spec.name, name)
        self._credentials[name] = (now + _TRUSTED_FOR, credentials)
        return credentials

    async def _read(self, store: str, name: str) -> Credentials:
        where = f"Secret {self._namespace}/{name} of store {store!r}"
        try:
            values = await self._secrets.read_secret(self._namespace, name)
        except ClusterError as error:
            raise StoreError(f"{where} can't be read: {error}") from error
        if values is None:
            raise StoreCredentialsError(
                f"{where} does not exist; create it with the keys {ACCESS_KEY} and {SECRET_KEY}"
            )
        found = {key: values.get(key, b"").decode(errors="replace").strip() for key in (ACCESS_KEY, SECRET_KEY)}
        missing = [key for key, value in found.items() if not value]
        if missing:
            raise StoreCredentialsError(f"{where} lacks the key {' and '.join(missing)}")
        return Credentials(found[ACCESS_KEY], found[SECRET_KEY])
