"""Starting the control plane: etcd, API server, controller manager, scheduler, kube-proxy and CoreDNS."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from tests.cluster import commands, configs, settings
from tests.cluster.api import Api
from tests.cluster.binaries import Binaries
from tests.cluster.network import Network
from tests.cluster.pki import (
    ADMIN,
    CONTROLLER_MANAGER,
    DNS,
    PROXY,
    SCHEDULER,
    Identity,
    Pki,
    node_identity,
)
from tests.cluster.processes import ProcessTable
from tests.cluster.report import wait_until
from tests.cluster.settings import Places

SERVER = f"https://{settings.GATEWAY}:{settings.API_PORT}"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns")


def all_identities() -> list[Identity]:
    """Everyone who gets a token; nodes that may join later included, as the API server reads the file once."""
    nodes = [node_identity(settings.node_name(index)) for index in range(settings.MAX_NODES)]
    return [ADMIN, CONTROLLER_MANAGER, SCHEDULER, PROXY, DNS, *nodes]


class ControlPlane:
    """The control plane of one cluster inside the cluster's network namespace."""

    def __init__(self, places: Places, binaries: Binaries, processes: ProcessTable) -> None:
        self.places = places
        self.binaries = binaries
        self.processes = processes
        self.pki = Pki(places.pki)
        self.network = Network(places)

    def kubeconfig_of(self, identity: Identity, name: str) -> Path:
        """Writes and returns the kubeconfig of a component."""
        return self.pki.write_kubeconfig(self.places.data / "kubeconfigs" / name, SERVER, identity)

    def start_api(self) -> Api:
        """Makes the key material, starts etcd and the API server, and returns once it is ready."""
        addresses = ["127.0.0.1", settings.INNER_ADDRESS, settings.GATEWAY, settings.SERVICE_OF_API]
        self.pki.create(addresses, all_identities())
        self.pki.write_kubeconfig(self.places.kubeconfig, SERVER, ADMIN)
        self._start("etcd", commands.etcd_command(self._program("etcd"), self.places.data / "etcd", 2379, 2380))
        server = commands.api_server_command(
            self._program("kube-apiserver"), self.pki.folder, 2379, "0.0.0.0", settings.API_PORT
        )
        self._start("kube-apiserver", [*server, *commands.cluster_api_server_flags(self.pki.folder)])
        api = Api(self.places.kubeconfig)
        wait_until(
            "the API server", api.is_ready, 90, 0.1, lambda: self._exited("etcd") or self._exited("kube-apiserver")
        )
        return api

    def start_rest(self) -> None:
        """Starts what works against the API server."""
        manager = self.kubeconfig_of(CONTROLLER_MANAGER, "controller-manager")
        scheduler = self.kubeconfig_of(SCHEDULER, "scheduler")
        self._start(
            "kube-controller-manager",
            commands.controller_manager_command(
                self._program("kube-controller-manager"), self.pki.folder, manager, 10257
            ),
        )
        self._start("kube-scheduler", commands.scheduler_command(self._program("kube-scheduler"), scheduler))
        proxy_config = self.places.data / "proxy.yaml"
        proxy_config.write_text(configs.proxy_config(self.kubeconfig_of(PROXY, "proxy"), settings.node_name(0)))
        self._start("kube-proxy", [str(self._program("kube-proxy")), f"--config={proxy_config}"])
        corefile = self.places.data / "Corefile"
        corefile.write_text(configs.corefile(self.kubeconfig_of(DNS, "coredns")))
        self._start("coredns", [str(self._program("coredns")), "-conf", str(corefile)])

    def wait_for_dns(self) -> None:
        """Returns once CoreDNS knows the API server's own Service."""
        wait_until(
            "CoreDNS",
            lambda: resolve("kubernetes.default.svc.cluster.local", settings.GATEWAY) == settings.SERVICE_OF_API,
            30,
            0.1,
            lambda: self._exited("coredns"),
        )

    def _program(self, name: str) -> Path:
        return self.binaries.program(name)

    def _start(self, name: str, command: list[str]) -> None:
        self.processes.start(name, self.network.inside(command), self.places.logs / f"{name}.log")

    def _exited(self, name: str) -> str | None:
        return self.processes.require_alive(name)


def dns_query(name: str) -> bytes:
    """A DNS question for the IPv4 address of a name."""
    header = struct.pack(">HHHHHH", 0x4C6F, 0x0100, 1, 0, 0, 0)
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split("."))
    return header + labels + b"\0" + struct.pack(">HH", 1, 1)


def address_in(answer: bytes) -> str | None:
    """The address in an answer to `dns_query`, or None when there is none.

    The one record's data is the answer's end: the question asked for a single A record and no extra sections.
    """
    if len(answer) < 12:
        return None
    flags, _, count = struct.unpack(">HHH", answer[2:8])
    return socket.inet_ntoa(answer[-4:]) if flags & 0x000F == 0 and count >= 1 else None


def resolve(name: str, server: str) -> str | None:
    """Asks one DNS server for one name, once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.5)
        try:
            asking.sendto(dns_query(name), (server, 53))
            return address_in(asking.recv(512))
        except OSError:
            return None
