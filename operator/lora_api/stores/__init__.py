"""Adapters of the `Store` Protocol, and the way from a profile's store to one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lora_api.layout import run_prefix
from lora_api.profile import StoreSpec
from lora_api.store import Store, StoreCredentialsError
from lora_api.stores.directory import DirectoryStore

__all__ = ["Credentials", "DirectoryStore", "credentials_from_folder", "open_bucket", "open_store"]

ACCESS_KEY = "accessKey"
SECRET_KEY = "secretKey"  # noqa: S105 - the name of a key, not a secret


@dataclass(frozen=True)
class Credentials:
    """Access to an S3 server. Never printed."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)


def credentials_from_folder(folder: Path) -> Credentials:
    """Reads a mounted Secret.

    Raises:
        StoreCredentialsError: When one of its two files is missing or empty.
    """
    values = {}
    for name in (ACCESS_KEY, SECRET_KEY):
        file = folder / name
        values[name] = file.read_text().strip() if file.is_file() else ""
        if not values[name]:
            raise StoreCredentialsError(
                f"{file}: missing or empty; the Secret needs the keys {ACCESS_KEY} and {SECRET_KEY}"
            )
    return Credentials(values[ACCESS_KEY], values[SECRET_KEY])


def open_store(spec: StoreSpec, credentials: Credentials | None = None) -> Store:
    """The store of a profile, seen from below its own prefix. Does no I/O.

    Raises:
        StoreCredentialsError: For an S3 store without credentials.
    """
    if spec.type == "directory":
        root = DirectoryStore(Path(spec.directory or ""))
        return root.sub(spec.prefix) if spec.prefix else root
    return open_bucket(spec, spec.bucket or "", run_prefix("", spec.prefix) if spec.prefix else "", credentials)


def open_bucket(spec: StoreSpec, bucket: str, prefix: str, credentials: Credentials | None) -> Store:
    """Another bucket on the server of an S3 store, such as one with models or datasets."""
    from lora_api.stores.s3 import S3Store  # noqa: PLC0415 - minio is only needed for S3

    if credentials is None:
        raise StoreCredentialsError(f"store {spec.name!r} at {spec.endpoint}: no credentials were given")
    return S3Store.connect(spec.endpoint or "", bucket, prefix, region=spec.region, credentials=credentials)
