"""Where models and datasets lie: a local folder as it stands, or a copy of an S3 prefix in the cache folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from lora_api.profile import StoreSpec
from lora_api.run import RunConfig
from lora_api.store import Store, StoredObject
from lora_api.stores import Credentials, open_bucket
from lora_trainer.errors import ConfigurationError, DataError
from lora_trainer.retry import RetryingStore, place

SCHEME = "s3://"
Report = Callable[[str], None]


def split_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/some/prefix/` as `("bucket", "some/prefix/")`; the prefix is empty or ends in a slash."""
    bucket, _, prefix = uri.removeprefix(SCHEME).partition("/")
    prefix = prefix.strip("/")
    return bucket, prefix + "/" if prefix else ""


def store_of(bucket: str, run: RunConfig, field: str) -> StoreSpec:
    """The S3 store whose server and credentials reach a bucket: the one with that bucket, else the job's own.

    Raises:
        ConfigurationError: When neither exists.
    """
    candidates = [spec for spec in (run.store, *run.stores) if spec.type == "s3"]
    exact = [spec for spec in candidates if spec.bucket == bucket]
    if exact:
        return exact[0]
    if run.store.type == "s3":
        return run.store
    raise ConfigurationError(
        f"{field}: no store of the profile has the bucket {bucket!r}; S3 stores: "
        + (", ".join(f"{spec.name} ({spec.bucket})" for spec in candidates) or "none")
    )


def local_folder(
    location: str,
    field: str,
    run: RunConfig,
    *,
    cache: Path,
    credentials: Credentials | None,
    report: Report,
    download: bool = True,
) -> Path:
    """The folder for a location of the configuration; an S3 prefix is copied into the cache first.

    Args:
        location: A local path, or `s3://bucket/prefix`.
        field: Path of the configuration field, for messages.
        run: Where the stores are.
        cache: Folder for copies.
        credentials: Of the S3 stores.
        report: Told what is being done.
        download: False when another process of this node has just done so.

    Raises:
        ConfigurationError: When no store reaches the bucket.
        DataError: When nothing lies under the prefix.
        StoreError: When the server can't be used.
    """
    if not location.startswith(SCHEME):
        return Path(location).expanduser()
    bucket, prefix = split_uri(location)
    spec = store_of(bucket, run, field)
    name = hashlib.sha256(f"{spec.endpoint}|{bucket}|{prefix}".encode()).hexdigest()[:16]
    folder = cache / "s3" / bucket / name
    if download and not mirror(RetryingStore(open_bucket(spec, bucket, prefix, credentials)), folder, report):
        raise DataError(f"{field}: nothing lies under {location} at {spec.endpoint}")
    return folder


def local_file(
    location: str,
    field: str,
    run: RunConfig,
    *,
    cache: Path,
    credentials: Credentials | None,
    report: Report,
    download: bool = True,
) -> Path:
    """The file for a location of the configuration, `s3://bucket/key` copied into the cache first; see `local_folder`.

    Raises:
        ConfigurationError: When no store reaches the bucket, or the file is not there.
        StoreError: When the server can't be used.
    """
    if not location.startswith(SCHEME):
        path = Path(location).expanduser()
        if not path.is_file():
            raise ConfigurationError(f"{field}: {path} is no file")
        return path
    folder_uri, _, name = location.rpartition("/")
    bucket, prefix = split_uri(folder_uri)
    spec = store_of(bucket, run, field)
    where = hashlib.sha256(f"{spec.endpoint}|{bucket}|{prefix}".encode()).hexdigest()[:16]
    target = cache / "s3-files" / bucket / where / name
    if download:
        store = RetryingStore(open_bucket(spec, bucket, prefix, credentials))
        item = next((item for item in store.list(name) if item.key == name), None)
        if item is None:
            raise ConfigurationError(f"{field}: there is no {location} at {spec.endpoint}")
        if not _is_current(target, item):
            report(f"downloading {name}")
            _download(store, item, target)
    return target


def mirror(store: Store, folder: Path, report: Report) -> int:
    """Makes a folder equal to a store; returns the number of files.

    Files of the same size and time are kept as they are. Each file appears whole or not at all, so that several
    processes may do this at once. Files that the store no longer has are removed.
    """
    objects = [item for item in store.list() if not item.key.endswith("/") and _is_safe(item.key)]
    missing = [item for item in objects if not _is_current(folder / item.key, item)]
    for number, item in enumerate(missing, 1):
        report(f"downloading {number}/{len(missing)}: {item.key}")
        _download(store, item, folder / item.key)
    wanted = {item.key for item in objects}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in wanted and not path.name.startswith(".part-"):
            path.unlink(missing_ok=True)
    return len(objects)


def _is_safe(key: str) -> bool:
    return ".." not in PurePosixPath(key).parts and not key.startswith("/")


def _is_current(path: Path, item: StoredObject) -> bool:
    try:
        stat = path.stat()
    except OSError:
        return False
    return stat.st_size == item.size_bytes and int(stat.st_mtime) == int(item.modified_at)


def _download(store: Store, item: StoredObject, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as scratch:
        part = Path(scratch) / "file"
        if not store.fetch(item.key, part):
            raise DataError(f"{place(store, item.key)}: was removed while it was being downloaded")
        found = part.stat().st_size
        if found != item.size_bytes:
            raise DataError(
                f"{place(store, item.key)}: {found} bytes arrived, {item.size_bytes} expected; it is being changed"
            )
        os.utime(part, (item.modified_at, item.modified_at))
        part.replace(target)
