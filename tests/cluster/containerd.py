"""Talking to one node's containerd through its own client program."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.cluster.settings import ClusterError

KUBERNETES_NAMESPACE = "k8s.io"


class Containerd:
    """The containerd behind one socket."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def run(self, *arguments: str | Path, check: bool = True) -> str:
        """Runs `ctr` in Kubernetes' namespace and returns what it printed.

        Raises:
            ClusterError: when it failed and `check` is set.
        """
        command = ["ctr", "-a", str(self.socket), "-n", KUBERNETES_NAMESPACE, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise ClusterError(f"ctr {' '.join(map(str, arguments[:3]))}: {done.stderr.strip()[-800:]}")
        return done.stdout

    def is_serving(self) -> bool:
        """Whether it answers and its Kubernetes part is loaded."""
        if not self.socket.exists():
            return False
        listing = self.run("plugins", "ls", check=False)
        return any(line.split()[1:2] == ["cri"] and line.split()[-1] == "ok" for line in listing.splitlines())

    def image_references(self) -> set[str]:
        """The names of all images it has."""
        return set(self.run("images", "ls", "-q").split())

    def container_ids(self) -> list[str]:
        """All containers it remembers, running or not."""
        return self.run("containers", "ls", "-q").split()

    def used_images(self) -> set[str]:
        """The names of images that containers were made from."""
        lines = self.run("containers", "ls").splitlines()[1:]
        return {line.split()[1] for line in lines if len(line.split()) > 1}

    def forget_containers(self) -> int:
        """Removes every container with its task and returns how many there were; their processes must have ended."""
        identifiers = self.container_ids()
        if identifiers:
            self.run("tasks", "delete", "--force", *identifiers, check=False)
            self.run("containers", "delete", *identifiers, check=False)
        return len(identifiers)

    def has_snapshot(self, key: str) -> bool:
        """Whether a snapshot of this name exists."""
        return bool(self.run("snapshots", "info", key, check=False).strip())

    def prepare_snapshot(self, key: str, parent: str | None) -> Path:
        """Makes a writable snapshot and returns the folder its own content goes to."""
        self.run("snapshots", "remove", key, check=False)
        self.run("snapshots", "prepare", key, *([parent] if parent else []))
        return writable_folder(self.run("snapshots", "mounts", "/nowhere", key))

    def commit_snapshot(self, name: str, key: str) -> None:
        """Turns a writable snapshot into an image layer's."""
        self.run("snapshots", "commit", name, key)

    def release_snapshot(self, name: str) -> None:
        """Hands a snapshot to garbage collection: `ctr` pins what it commits, an image's label is enough here."""
        self.run("snapshots", "label", name, "containerd.io/gc.root=")


def writable_folder(mount_command: str) -> Path:
    """The folder that a snapshot's own files lie in, from the mount command `ctr snapshots mounts` prints.

    A snapshot above others is an overlay with an upper folder; the lowest one is a plain bind mount.

    Raises:
        ClusterError: for another kind of snapshotter.
    """
    upper = re.search(r"upperdir=([^,\s]+)", mount_command)
    if upper:
        return Path(upper.group(1))
    bind = re.match(r"mount -t bind (\S+) ", mount_command)
    if bind:
        return Path(bind.group(1))
    raise ClusterError(f"snapshots of this containerd are neither overlays nor bind mounts: {mount_command.strip()}")
