"""Official release files of the cluster's programs, each checked against its published checksum."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import settings
from tests.cluster.gobuild import KUBE_PROGRAMS, Part
from tests.cluster.settings import ClusterError

BASE_VARIABLE = "LORA_CLUSTER_DOWNLOAD_BASE"
TIMEOUT_SECONDS = 4
ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True)
class Release:
    """One downloadable file, and the program or programs in it.

    Attributes:
        url: the file.
        checksum_url: a text that holds the file's SHA-256, alone or beside file names.
        members: program names by their path in the archive; empty when the file is the program itself.
    """

    program: str
    url: str
    checksum_url: str
    members: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[1]


def architecture() -> str:
    """This machine's architecture as release files spell it.

    Raises:
        ClusterError: when there are no release files for it.
    """
    machine = platform.machine().lower()
    if machine not in ARCHITECTURES:
        raise ClusterError(f"no release files for a machine of kind {machine!r}")
    return ARCHITECTURES[machine]


def releases(part: str, arch: str) -> list[Release]:
    """The official files of a part."""
    if part == "controlplane":
        base = f"https://dl.k8s.io/{settings.KUBERNETES_VERSION}/bin/linux/{arch}"
        kube = [Release(name, f"{base}/{name}", f"{base}/{name}.sha256") for name in KUBE_PROGRAMS]
        return [*kube, _etcd(arch)]
    if part == "coredns":
        version = settings.COREDNS_VERSION
        file = f"coredns_{version.removeprefix('v')}_linux_{arch}.tgz"
        base = f"https://github.com/coredns/coredns/releases/download/{version}"
        return [Release("coredns", f"{base}/{file}", f"{base}/{file}.sha256", (("coredns", "coredns"),))]
    file = f"helm-{settings.HELM_VERSION}-linux-{arch}.tar.gz"
    base = "https://get.helm.sh"
    return [Release("helm", f"{base}/{file}", f"{base}/{file}.sha256sum", ((f"linux-{arch}/helm", "helm"),))]


def _etcd(arch: str) -> Release:
    version = settings.ETCD_VERSION
    folder = f"etcd-{version}-linux-{arch}"
    base = f"https://github.com/etcd-io/etcd/releases/download/{version}"
    return Release("etcd", f"{base}/{folder}.tar.gz", f"{base}/SHA256SUMS", ((f"{folder}/etcd", "etcd"),))


def rebased(url: str, base: str | None) -> str:
    """A URL moved below a mirror, which keeps the original host as its first folder; unchanged without a mirror."""
    return url if base is None else f"{base.rstrip('/')}/{url.removeprefix('https://')}"


def expected_checksum(text: str, file_name: str) -> str:
    """The SHA-256 of a file in a checksum text.

    Raises:
        ClusterError: when the text names other files only, or holds no checksum.
    """
    for line in text.splitlines():
        words = line.split()
        if not words or not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]):
            continue
        if len(words) == 1 or words[-1].lstrip("*").rsplit("/", 1)[-1] == file_name:
            return words[0].lower()
    raise ClusterError(f"no SHA-256 of {file_name} in its published checksums")


def download(part: Part, destination: Path) -> None:
    """Downloads a part's programs.

    Raises:
        ClusterError: when switched off, out of reach, or not what its checksum says.
    """
    base = os.environ.get(BASE_VARIABLE)
    if base in {"", "off"}:
        raise ClusterError(f"switched off by {BASE_VARIABLE}")
    for release in releases(part.name, architecture()):
        url = rebased(release.url, base)
        # the small file first: without a network this fails in a moment
        checksum = expected_checksum(_fetch_text(rebased(release.checksum_url, base)), release.file_name)
        file = destination / f"{release.file_name}.download"
        found = _fetch_file(url, file)
        if found != checksum:
            raise ClusterError(f"{url}: SHA-256 is {found}, published is {checksum}")
        _install(release, file, destination)


def _install(release: Release, file: Path, destination: Path) -> None:
    if not release.members:
        target = destination / release.program
        file.rename(target)
        target.chmod(0o755)
        return
    with tarfile.open(file) as archive:
        for member, program in release.members:
            source = archive.extractfile(member)
            if source is None:
                raise ClusterError(f"{release.url}: {member} is not a file")
            target = destination / program
            with target.open("wb") as output:
                shutil.copyfileobj(source, output)
            target.chmod(0o755)
    file.unlink()


def _fetch_text(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            body: bytes = answer.read(1 << 20)
    except OSError as error:
        raise ClusterError(f"{url}: {error}") from error
    return body.decode(errors="replace")


def _fetch_file(url: str, path: Path) -> str:
    """Stores a file and returns its SHA-256."""
    hasher = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, path.open("wb") as output:
            while block := answer.read(1 << 20):
                hasher.update(block)
                output.write(block)
    except OSError as error:
        raise ClusterError(f"{url}: {error}") from error
    return hasher.hexdigest()
