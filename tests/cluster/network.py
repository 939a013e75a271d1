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
from tests.cluster.settings import ClusterError

NAMESPACE_FILE = Path("/run/netns") / settings.NETWORK_NAMESPACE
OWN_INTERFACES = frozenset({settings.HOST_LINK, settings.INNER_LINK, settings.BRIDGE})


def inside(command: list[str]) -> list[str]:
    """A command to run inside the namespace.

    Not `ip netns exec`: that mounts a /sys of its own, without the control groups that kubelets and runc need.
    """
    nsenter = shutil.which("nsenter") or "nsenter"
    return [nsenter, f"--net={NAMESPACE_FILE}", "--", *command]


def setup_commands() -> list[list[str]]:
    """What creates the namespace and its links, in order."""
    namespace, host, inner, bridge = (
        settings.NETWORK_NAMESPACE,
        settings.HOST_LINK,
        settings.INNER_LINK,
        settings.BRIDGE,
    )
    plan = [
        f"ip netns add {namespace}",
        f"ip link add {host} type veth peer name {inner} netns {namespace}",
        f"ip address add {settings.HOST_ADDRESS}/30 dev {host}",
        f"ip link set {host} up",
        f"ip -n {namespace} link set lo up",
        f"ip -n {namespace} address add {settings.INNER_ADDRESS}/30 dev {inner}",
        f"ip -n {namespace} link set {inner} up",
        f"ip -n {namespace} link add {bridge} type bridge",
        f"ip -n {namespace} address add {settings.GATEWAY}/16 dev {bridge}",
        f"ip -n {namespace} link set {bridge} up",
        f"ip -n {namespace} route add {settings.SERVICE_NETWORK} dev {bridge}",
        f"ip route add {settings.POD_NETWORK} via {settings.INNER_ADDRESS}",
        f"ip route add {settings.SERVICE_NETWORK} via {settings.INNER_ADDRESS}",
    ]
    return [line.split() for line in plan]


def exists() -> bool:
    """Whether the namespace is there."""
    return NAMESPACE_FILE.exists()


def create() -> None:
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
    for command in setup_commands():
        _run(command)
    _run(inside(["sysctl", "-qw", "net.ipv4.ip_forward=1"]))


def remove() -> None:
    """Removes the namespace and the host's end of the link; what is not there is no error."""
    _run(["ip", "link", "delete", settings.HOST_LINK], check=False)
    _run(["ip", "netns", "delete", settings.NETWORK_NAMESPACE], check=False)


def overlapping_routes(routes: Iterable[dict[str, object]]) -> list[str]:
    """The destinations among a machine's routes that overlap the cluster's networks, its own links excepted."""
    wanted = [
        ipaddress.ip_network(text)
        for text in (settings.LINK_NETWORK, settings.POD_NETWORK, settings.SERVICE_NETWORK)
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
