"""Container images as files: the little of the OCI format that loading them needs."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Image:
    """An image without its layers' content: what a container runtime needs when it has the layers already."""

    manifest: bytes
    config: bytes

    @property
    def diff_ids(self) -> list[str]:
        """The digests of the uncompressed layers, lowest first."""
        return list(json.loads(self.config)["rootfs"]["diff_ids"])


def sha256(raw: bytes) -> str:
    """A digest as OCI writes it."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The name of each layer together with all below it, lowest first; container runtimes key snapshots by it.

    References:
        OCI image specification, config.md, "Layer ChainID".
    """
    chains: list[str] = []
    for diff_id in diff_ids:
        chains.append(sha256(f"{chains[-1]} {diff_id}".encode()) if chains else diff_id)
    return chains


def image_from_config(config: bytes, layer_sizes: Sequence[int] | None = None) -> Image:
    """An image whose layers are named uncompressed, from its configuration alone.

    Args:
        config: the image's configuration.
        layer_sizes: sizes in bytes, lowest first; only shown to people, zero when left out.
    """
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    sizes = layer_sizes or [0] * len(diff_ids)
    layers = [
        {"mediaType": LAYER_TYPE, "digest": digest, "size": size} for digest, size in zip(diff_ids, sizes, strict=True)
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": sha256(config), "size": len(config)},
        "layers": layers,
    }
    return Image(json.dumps(manifest).encode(), config)


def write_archive(path: Path, reference: str, image: Image, layers: Sequence[bytes] = ()) -> None:
    """Writes an OCI archive; layers may be left out when the importer has their content or snapshots already."""
    descriptor = {
        "mediaType": MANIFEST_TYPE,
        "digest": sha256(image.manifest),
        "size": len(image.manifest),
        "annotations": {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference},
    }
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for blob in (image.manifest, image.config, *layers):
            _add(archive, "blobs/sha256/" + sha256(blob).removeprefix("sha256:"), blob)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def busybox_image(files: Mapping[str, bytes], applets: Sequence[str], architecture: str) -> tuple[Image, bytes]:
    """A small image with a shell and its tools, and its only layer.

    It serves twice: as the pause container of every pod, where it only sleeps, and as a tool box for tests.

    Args:
        files: content by absolute path: `/bin/busybox` and the libraries that resolving names needs.
        applets: the tools that get a link in `/bin`.
        architecture: as in OCI, for example `amd64`.
    """
    layer = _busybox_layer(files, applets)
    config: Mapping[str, Any] = {
        "architecture": architecture,
        "os": "linux",
        "config": {
            "Entrypoint": ["/bin/busybox"],
            "Cmd": ["sleep", "2147483647"],
            "Env": ["PATH=/bin"],
            "User": "65532:65532",
        },
        "rootfs": {"type": "layers", "diff_ids": [sha256(layer)]},
    }
    return image_from_config(json.dumps(config).encode(), [len(layer)]), layer


def _busybox_layer(files: Mapping[str, bytes], applets: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folders = {str(parent).lstrip("/") for path in files for parent in PurePosixPath(path).parents} - {""}
        for folder in [*sorted(folders | {"etc"}), "tmp"]:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
        for applet in sorted(set(applets) - {"busybox"}):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return buffer.getvalue()
