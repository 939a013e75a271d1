"""Where the cluster keeps its things, which addresses it uses and which versions it runs."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "v1.36.3"
ETCD_VERSION = "v3.6.8"
COREDNS_VERSION = "v1.14.7"
HELM_VERSION = "v3.22.0"

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

HOST_LINK = "lora-host"
INNER_LINK = "lora-inner"
BRIDGE = "lora-pods"
HOST_ADDRESS = "10.84.0.1"
INNER_ADDRESS = "10.84.0.2"
LINK_NETWORK = "10.84.0.0/30"
GATEWAY = "10.85.0.1"
POD_NETWORK = "10.85.0.0/16"
FIRST_POD_ADDRESS = "10.85.1.1"
SERVICE_NETWORK = "10.96.0.0/16"
SERVICE_OF_API = "10.96.0.1"
API_PORT = 6443
FIRST_KUBELET_PORT = 10250
S3_PORT = 8333
MAX_NODES = 8

S3_ACCESS_KEY = "lora-operator"
S3_SECRET_KEY = "lora-operator-secret"  # a well-known default of a throw-away store

OWNER_VARIABLE = "LORA_CLUSTER_OWNER"


class ClusterError(Exception):
    """Something the person at the terminal can act on; shown without a traceback."""


def cache_root() -> Path:
    """The folder that outlives clusters: binaries, images and node image stores."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lora-operator"


@dataclass(frozen=True)
class Places:
    """Every path of one cluster.

    `run` is outside the cache on purpose: addresses and the network namespace are one per machine, so the record of
    what runs must be one per machine too, whichever cache folder a caller uses.
    """

    cache: Path
    run: Path

    @classmethod
    def default(cls) -> Places:
        """The places every command uses; `LORA_CLUSTER_RUN` moves the run folder."""
        return cls(cache=cache_root(), run=Path(os.environ.get("LORA_CLUSTER_RUN", "/run/lora-operator")))

    @property
    def data(self) -> Path:
        """Thrown away with the cluster: etcd, certificates, logs, kubelets' folders."""
        return self.cache / "cluster"

    @property
    def pki(self) -> Path:
        return self.data / "pki"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def kubeconfig(self) -> Path:
        return self.data / "kubeconfig"

    @property
    def processes(self) -> Path:
        return self.run / "processes"

    @property
    def lock(self) -> Path:
        return self.run / "cluster.lock"

    @property
    def build_lock(self) -> Path:
        return self.run / "images.lock"

    @property
    def ready_marker(self) -> Path:
        """Exists only while a cluster is completely up: its absence beside live processes means half-up."""
        return self.run / "ready.json"

    @property
    def images(self) -> Path:
        """Image builds: buildah's storage, the base image and what was built from which inputs."""
        return self.cache / "images"

    @property
    def build_run(self) -> Path:
        """buildah's notes on what is mounted; beside the cluster's, since builds outlive clusters."""
        return self.run.with_name(self.run.name + "-images")

    def node_data(self, node: str) -> Path:
        """A node's kubelet folder and configuration, thrown away with the cluster."""
        return self.data / node

    def node_store(self, node: str) -> Path:
        """A node's image store, kept between clusters."""
        return self.cache / "nodes" / node

    def node_run(self, node: str) -> Path:
        """A node's sockets and running containers' state."""
        return self.run / node

    def containerd_socket(self, node: str) -> Path:
        return self.node_run(node) / "containerd.sock"


def node_name(index: int) -> str:
    """The name of the node with a zero-based index; names are stable so that image stores can be kept."""
    return f"node-{index + 1}"


def versions() -> dict[str, str]:
    """The version of every component, by project."""
    return {
        "kubernetes": KUBERNETES_VERSION,
        "etcd": ETCD_VERSION,
        "coredns": COREDNS_VERSION,
        "helm": HELM_VERSION,
    }


def digest_of(*parts: bytes | str) -> str:
    """A short, stable key of its parts; each part is delimited, so that ("ab", "c") differs from ("a", "bc")."""
    hasher = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        hasher.update(len(raw).to_bytes(8, "big"))
        hasher.update(raw)
    return hasher.hexdigest()[:16]
