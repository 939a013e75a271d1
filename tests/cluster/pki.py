"""Certificates, service account keys and bearer tokens of a cluster."""

from __future__ import annotations

import base64
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster.settings import ClusterError

API_SERVER_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
)


@dataclass(frozen=True)
class Identity:
    """Who a bearer token stands for."""

    user: str
    groups: tuple[str, ...] = ()


ADMIN = Identity("admin", ("system:masters",))
CONTROLLER_MANAGER = Identity("system:kube-controller-manager")
SCHEDULER = Identity("system:kube-scheduler")
PROXY = Identity("system:kube-proxy")
# CoreDNS reads Services and Namespaces only; no built-in role has just that
DNS = Identity("system:coredns", ("system:masters",))


def node_identity(node: str) -> Identity:
    """What the Node authorizer and NodeRestriction expect of a kubelet."""
    return Identity(f"system:node:{node}", ("system:nodes",))


def run_openssl(*arguments: str | Path) -> None:
    """Runs openssl; it is on every Linux, whereas a Python library for this would be one more dependency."""
    program = shutil.which("openssl")
    if program is None:
        raise ClusterError("openssl not found; it makes the cluster's certificates (Debian package: openssl)")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")


def subject_alternative_names(addresses: Iterable[str]) -> str:
    """The extension of the API server's certificate: its names inside the cluster and the addresses it answers on."""
    names = [f"DNS:{name}" for name in API_SERVER_NAMES]
    return ",".join([*names, *(f"IP:{address}" for address in addresses)])


class Pki:
    """The key material of one cluster in one folder; made once, all files readable by their owner only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name

    @property
    def tokens_file(self) -> Path:
        return self.path("tokens.csv")

    def create(self, addresses: Sequence[str], identities: Sequence[Identity]) -> None:
        """Makes an authority, the API server's certificates, the service account key and one token per identity.

        Args:
            addresses: IP addresses the API server is reached at.
            identities: everyone who needs a kubeconfig.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._authority()
        self._certificate("apiserver", "/CN=kube-apiserver", subject_alternative_names(addresses), "serverAuth")
        self._certificate("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "", "clientAuth")
        self._certificate("front-proxy", "/CN=front-proxy-client", "", "clientAuth")
        run_openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", self.path("sa.key"))
        run_openssl("ec", "-in", self.path("sa.key"), "-pubout", "-out", self.path("sa.pub"))
        self._tokens(identities)
        for path in self.folder.iterdir():
            path.chmod(0o600)

    def _authority(self) -> None:
        run_openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365"),
            *("-subj", "/CN=lora-cluster-ca", "-addext", "keyUsage=critical,keyCertSign,digitalSignature"),
            *("-keyout", self.path("ca.key"), "-out", self.path("ca.crt")),
        )

    def _certificate(self, name: str, subject: str, alternative_names: str, usage: str) -> None:
        request, extensions = self.path(f"{name}.csr"), self.path(f"{name}.ext")
        run_openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", subject, "-keyout", self.path(f"{name}.key"), "-out", request),
        )
        lines = [f"extendedKeyUsage={usage}", "keyUsage=digitalSignature"]
        if alternative_names:
            lines.append(f"subjectAltName={alternative_names}")
        extensions.write_text("\n".join(lines) + "\n")
        run_openssl(
            *("x509", "-req", "-in", request, "-CA", self.path("ca.crt"), "-CAkey", self.path("ca.key")),
            *("-days", "365", "-extfile", extensions, "-out", self.path(f"{name}.crt")),
        )
        request.unlink()
        extensions.unlink()

    def _tokens(self, identities: Sequence[Identity]) -> None:
        lines = []
        for identity in identities:
            groups = ",".join(identity.groups)
            lines.append(f'{secrets.token_hex(24)},{identity.user},{identity.user},"{groups}"')
        self.tokens_file.write_text("\n".join(lines) + "\n")

    def token(self, identity: Identity) -> str:
        """The bearer token of an identity that `create` was given."""
        for line in self.tokens_file.read_text().splitlines():
            token, user, *_ = line.split(",")
            if user == identity.user:
                return token
        raise ClusterError(f"no token for {identity.user} in {self.tokens_file}")

    def write_kubeconfig(self, path: Path, server: str, identity: Identity) -> Path:
        """Writes a self-contained kubeconfig; it can be copied to another machine's user without its folder."""
        text = yaml.safe_dump(kubeconfig(server, self.path("ca.crt").read_bytes(), self.token(identity)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
        return path


def kubeconfig(server: str, authority: bytes, token: str) -> dict[str, object]:
    """A kubeconfig with one cluster, one user and one context, all named `lora`."""
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lora", "cluster": cluster}],
        "users": [{"name": "lora", "user": {"token": token}}],
        "contexts": [{"name": "lora", "context": {"cluster": "lora", "user": "lora"}}],
        "current-context": "lora",
    }
