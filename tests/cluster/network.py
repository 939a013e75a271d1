"""The cluster's own network namespace.

Everything of the cluster runs inside one namespace: bridge, service rules, port numbers and forwarding never touch
the machine's own network, and removing the namespace removes all of it. One pair of linked interfaces lets the host
reach pods, Services and the API server. The namespace has no default route: no packet can leave the machine.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.cluster import settings
from tests.cluster.settings import ClusterError, Places

OWN_INTERFACES = frozenset({settings.HOST_LINK, settings.INNER_LINK, settings.BRIDGE})


class Network:
    """The network namespace of one cluster, held by a file in its run folder.

    `ip netns` is not used: it leaves a mount at /run/netns behind, and `ip netns exec` hides the control groups that
    kubelets and runc need behind a /sys of its own.
    """

    def __init__(self, places: Places) -> None:
        self.file = places.run / "network-namespace"

    def inside(self, command: list[str]) -> list[str]:
        """A command that runs inside the namespace; nsenter replaces itself by it, so the process id stays."""
        return [shutil.which("nsenter") or "nsenter", f"--net={self.file}", "--", *command]

    def exists(self) -> bool:
        """Whether anything of it is there."""
        return self.file.exists() or Path(f"/sys/class/net/{settings.HOST_LINK}").exists()

    def create(self) -> None:
        """Makes the namespace, its links and routes.

        Raises:
            ClusterError: when another network of this machine uses the same addresses.
        """
        clashes = overlapping_routes(json.loads(_run(["ip", "-json", "route", "show"]) or "[]"))
        if clashes:
            raise ClusterError(
                f"this machine already routes {', '.join(clashes)}; the cluster needs "
                f"{settings.LINK_NETWORK}, {settings.POD_NETWORK} and {settings.SERVICE_NETWORK}"
            )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()
        _run(["unshare", f"--net={self.file}", "true"])
        for command in self.setup_commands():
            _run(command)

    def setup_commands(self) -> list[list[str]]:
        """What gives the new namespace its links and routes, in order."""
        host, inner, bridge = settings.HOST_LINK, settings.INNER_LINK, settings.BRIDGE
        plan = [
            (False, f"ip link add {host} type veth peer name {inner} netns {self.file}"),
            (False, f"ip address add {settings.HOST_ADDRESS}/30 dev {host}"),
            (False, f"ip link set {host} up"),
            (True, "ip link set lo up"),
            (True, f"ip address add {settings.INNER_ADDRESS}/30 dev {inner}"),
            (True, f"ip link set {inner} up"),
            (True, f"ip link add {bridge} type bridge"),
            (True, f"ip address add {settings.GATEWAY}/16 dev {bridge}"),
            (True, f"ip link set {bridge} up"),
            # with kube-proxy down, a packet for a Service must end here
            (True, f"ip route add {settings.SERVICE_NETWORK} dev {bridge}"),
            (True, "sysctl -qw net.ipv4.ip_forward=1"),
            (False, f"ip route add {settings.POD_NETWORK} via {settings.INNER_ADDRESS}"),
            (False, f"ip route add {settings.SERVICE_NETWORK} via {settings.INNER_ADDRESS}"),
        ]
        return [self.inside(line.split()) if within else line.split() for within, line in plan]

    def remove(self) -> None:
        """Removes the namespace and the host's end of the link; what is not there is no error."""
        _run(["ip", "link", "delete", settings.HOST_LINK], check=False)
        _run(["umount", "--lazy", str(self.file)], check=False)
        self.file.unlink(missing_ok=True)


def overlapping_routes(routes: Iterable[dict[str, object]]) -> list[str]:
    """The destinations among a machine's routes that overlap the cluster's networks, its own links excepted."""
    wanted = [
        ipaddress.ip_network(text) for text in (settings.LINK_NETWORK, settings.POD_NETWORK, settings.SERVICE_NETWORK)
    ]
    found = []
    for route in routes:
        destination = str(route.get("dst", "default"))
        if destination == "default" or route.get("dev") in OWN_INTERFACES:
            continue
        try:
            network = ipaddress.ip_network(destination, strict=False)
        except ValueError:
            continue
        # a route that covers far more than ours, such as 10.0.0.0/8 through a gateway, is only overridden
        if any(network.overlaps(mine) and network.prefixlen >= mine.prefixlen for mine in wanted):
            found.append(destination)
    return found


def _run(command: list[str], check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
