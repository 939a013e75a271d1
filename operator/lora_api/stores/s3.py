"""An S3 server as a store, through the `minio` client."""

from __future__ import annotations

import io
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from lora_api.store import StoreCredentialsError, StoredObject, StoreError, StoreMissingError

if TYPE_CHECKING:
    from lora_api.stores import Credentials

_ABSENT = {"NoSuchKey", "NoSuchObject", "ResourceNotFound"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "Forbidden"}
_MISSING = {"NoSuchBucket"}


def _http_pool() -> urllib3.PoolManager:
    """Bounded waits and a few retries: a server that is away must not hang a caller for minutes."""
    cafile = os.environ.get("SSL_CERT_FILE")
    return urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=5, read=60),
        maxsize=16,
        ssl_context=ssl.create_default_context(cafile=cafile),
        retries=urllib3.Retry(total=3, backoff_factor=0.3, status_forcelist=(500, 502, 503, 504)),
    )


class _Reader(io.RawIOBase):
    """Reads memory piece by piece: a checkpoint of gigabytes is not copied as a whole before it is sent."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = memoryview(data), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._at + size
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece


class S3Store:
    """See `lora_api.store.Store`. Keys lie below `prefix` (empty, or ending in a slash) in one bucket."""

    def __init__(self, client: Minio, bucket: str, prefix: str, endpoint: str) -> None:
        self._client, self._bucket, self._prefix, self._endpoint = client, bucket, prefix, endpoint

    @classmethod
    def connect(cls, endpoint: str, bucket: str, prefix: str, *, region: str, credentials: Credentials) -> S3Store:
        """A store at `endpoint` (URL with scheme). Does no I/O."""
        url = urlsplit(endpoint)
        client = Minio(
            endpoint=url.netloc,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            secure=url.scheme == "https",
            region=region,  # given, so that the client never has to ask for it
            http_client=_http_pool(),
        )
        return cls(client, bucket, prefix, endpoint)

    @property
    def location(self) -> str:
        """`s3://bucket/prefix/`."""
        return f"s3://{self._bucket}/{self._prefix}"

    def put(self, key: str, data: bytes | memoryview | Path) -> None:
        """Writes bytes, or the content of a file; S3 shows an object only when it is whole."""
        with self._words("put", key):
            if isinstance(data, Path):
                self._client.fput_object(bucket_name=self._bucket, object_name=self._prefix + key, file_path=str(data))
            else:
                self._client.put_object(
                    bucket_name=self._bucket, object_name=self._prefix + key, data=_Reader(data), length=len(data)
                )

    def get(self, key: str) -> bytes | None:
        """The bytes; None when there is no such key."""
        with self._words("get", key):
            try:
                response = self._client.get_object(bucket_name=self._bucket, object_name=self._prefix + key)
            except S3Error as error:
                if error.code in _ABSENT:
                    return None
                raise
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

    def fetch(self, key: str, target: Path) -> bool:
        """Writes the object to a local file, under a temporary name first; False when there is no such key."""
        with self._words("fetch", key):
            try:
                self._client.fget_object(
                    bucket_name=self._bucket, object_name=self._prefix + key, file_path=str(target)
                )
            except S3Error as error:
                if error.code in _ABSENT:
                    return False
                raise
        return True

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Every object whose key starts with `prefix`, sorted by key."""
        with self._words("list", prefix):
            objects = self._client.list_objects(bucket_name=self._bucket, prefix=self._prefix + prefix, recursive=True)
            found = [
                StoredObject(
                    (item.object_name or "").removeprefix(self._prefix),
                    item.size or 0,
                    item.last_modified.timestamp() if item.last_modified else 0.0,
                )
                for item in objects
                if not item.is_dir
            ]
            if not found and not self._client.bucket_exists(bucket_name=self._bucket):
                raise StoreMissingError(f"bucket {self._bucket!r} does not exist at {self._endpoint}")
        return sorted(found, key=lambda item: item.key)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes exactly these keys, in this order, a thousand at a time."""
        with self._words("delete", keys[0] if keys else ""):
            for first in range(0, len(keys), 1000):
                batch = [DeleteObject(self._prefix + key) for key in keys[first : first + 1000]]
                for problem in self._client.remove_objects(bucket_name=self._bucket, delete_object_list=batch):
                    if problem.code not in _ABSENT:
                        raise StoreError(f"{self.location}: can't delete {problem.name}: {problem.message}")

    def sub(self, prefix: str) -> S3Store:
        """The same store, seen from below `prefix`."""
        return S3Store(self._client, self._bucket, self._prefix + prefix.strip("/") + "/", self._endpoint)

    @contextmanager
    def _words(self, verb: str, key: str) -> Iterator[None]:
        """Turns the client's errors into the store's, each naming place and operation."""
        where = f"{verb} s3://{self._bucket}/{self._prefix}{key} at {self._endpoint}"
        try:
            yield
        except S3Error as error:
            if error.code in _MISSING:
                raise StoreMissingError(f"bucket {self._bucket!r} does not exist at {self._endpoint}") from error
            if error.code in _REFUSED:
                raise StoreCredentialsError(f"{where}: refused ({error.code}): {error.message}") from error
            raise StoreError(f"{where}: {error.code}: {error.message}") from error
        except (InvalidResponseError, ServerError, MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            raise StoreError(f"{where}: {type(error).__name__}: {error}") from error
