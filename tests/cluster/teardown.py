"""Removing a cluster, however much of it there is.

Nothing here trusts that the cluster was started completely or ended in order: processes are found by their mark,
containers by containerd's state folder, mounts by where they are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.cluster.network import Network
from tests.cluster.nodes import containerd_name, is_listened_on, kubelet_name, stop_containers
from tests.cluster.processes import ProcessTable
from tests.cluster.settings import ClusterError, Places

CNI_RESULTS = Path("/var/lib/cni/results")
CONTAINER_LOG_LINKS = Path("/var/log/containers")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
# this path is fixed in the kubelet
DEVICE_PLUGIN_SOCKET = Path("/var/lib/kubelet/device-plugins/kubelet.sock")
SHIM_SOCKETS = Path("/run/containerd/s")
RUNC_STATE = Path("/run/containerd/runc/k8s.io")
EMPTY_FOLDERS = tuple(
    Path(text)
    for text in (
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet",
        "/var/lib/cni/results",
        "/var/lib/cni",
        "/var/log/containers",
        "/run/containerd/runc/k8s.io",
        "/run/containerd/runc",
        "/run/containerd/s",
        "/run/containerd",
    )
)


def leftovers(places: Places, processes: ProcessTable) -> list[str]:
    """What of a cluster exists, in words; empty when nothing does."""
    found = [f"process {name} ({entry.pid})" for name, entry in processes.alive().items()]
    found += [f"process {pid}" for pid in processes.marked() if f"({pid})" not in " ".join(found)]
    found += [f"mount {mount}" for mount in _mounts(places)]
    if Network(places).exists():
        found.append("network namespace")
    return found


def known_nodes(places: Places) -> list[str]:
    """The nodes that have or had a runtime folder."""
    return sorted(path.name for path in places.run.glob("node-*") if path.is_dir())


def remove_cluster(places: Places, processes: ProcessTable) -> None:
    """Stops and removes everything of a cluster but its caches and logs.

    Raises:
        ClusterError: when something could not be removed; folders below a remaining mount are left alone.
    """
    places.ready_marker.unlink(missing_ok=True)
    nodes = known_nodes(places)
    processes.stop([kubelet_name(node) for node in nodes], grace_seconds=2)
    for node in nodes:
        stop_containers(places, node)
    # containerd writes its database at the end; all others hold nothing that is kept
    processes.stop([containerd_name(node) for node in nodes], grace_seconds=5)
    processes.stop([entry.name for entry in processes.recorded()], grace_seconds=0)
    processes.sweep()
    unmount_below(_cluster_folders(places))
    Network(places).remove()
    _remove_traces_elsewhere(places)
    _remove_folders(places)


def mounts_below(mountinfo: str, folders: Iterable[Path]) -> list[str]:
    """The mount points at or below some folders, deepest and latest first, from the text of /proc/self/mountinfo."""
    prefixes = [str(folder).rstrip("/") for folder in folders]
    found = []
    for line in mountinfo.splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), line.split()[4])
        if any(point == prefix or point.startswith(prefix + "/") for prefix in prefixes):
            found.append(point)
    return found[::-1]


def _mounts(places: Places) -> list[str]:
    resolved = [folder.resolve() for folder in _cluster_folders(places)]
    return mounts_below(Path("/proc/self/mountinfo").read_text(), resolved)


def _cluster_folders(places: Places) -> list[Path]:
    return [places.run, places.data, places.cache / "nodes"]


def remove_cache(places: Places) -> list[Path]:
    """Removes what outlives clusters; the cluster must be down.

    Returns:
        The folders that were there.
    """
    unmount_below([places.images])
    folders = [places.cache / name for name in ("bin", "nodes", "images", "cluster")]
    removed = [folder for folder in (*folders, places.build_run) if folder.exists()]
    for folder in removed:
        shutil.rmtree(folder)
    return removed


def unmount_below(folders: Iterable[Path]) -> None:
    """Unmounts everything at or below some folders.

    Raises:
        ClusterError: when something stays mounted: removing a folder would then remove another's files.
    """
    resolved = [folder.resolve() for folder in folders]
    for point in mounts_below(Path("/proc/self/mountinfo").read_text(), resolved):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)
    left = mounts_below(Path("/proc/self/mountinfo").read_text(), resolved)
    if left:
        raise ClusterError(f"still mounted, so nothing below was removed: {', '.join(left[:5])}")


def _remove_folders(places: Places) -> None:
    for path in places.data.glob("*"):
        if path != places.logs:
            _remove(path)
    for path in places.run.glob("*"):
        if path.suffix != ".lock":  # somebody may be waiting for one
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_traces_elsewhere(places: Places) -> None:
    """Removes what kubelets, the network plugins and runc wrote at fixed places, and only what is ours of it."""
    identifiers = container_ids(places)
    for result in CNI_RESULTS.glob("*"):
        if any(identifier in result.name for identifier in identifiers):
            result.unlink(missing_ok=True)
    for link in CONTAINER_LOG_LINKS.glob("*.log"):
        if link.is_symlink() and str(link.readlink()).startswith(f"{places.data}/"):
            link.unlink(missing_ok=True)
    for socket in (DEVICE_PLUGIN_SOCKET, *SHIM_SOCKETS.glob("*")):
        if not is_listened_on(socket):
            socket.unlink(missing_ok=True)
    groups = [*CONTROL_GROUPS.glob("*/k8s.io"), CONTROL_GROUPS / "k8s.io"]
    for identifier in identifiers:
        shutil.rmtree(RUNC_STATE / identifier, ignore_errors=True)
        for group in groups:
            _remove_group(group / identifier)
    for folder in (*groups, *EMPTY_FOLDERS):
        # only empty folders go: what another Kubernetes on this machine uses is not empty
        with suppress(OSError):
            folder.rmdir()


def _remove_group(group: Path) -> None:
    """Removes a control group and those inside it, which runc does unless it was killed."""
    for folder in sorted(group.glob("**/"), reverse=True):
        with suppress(OSError):
            folder.rmdir()


def container_ids(places: Places) -> set[str]:
    """The ids of the pods and containers that containerd still has a folder of."""
    pods = "io.containerd.grpc.v1.cri/sandboxes/*"
    tasks = "io.containerd.runtime.v2.task/k8s.io/*"
    running = [*places.run.glob(f"node-*/state/{pods}"), *places.run.glob(f"node-*/state/{tasks}")]
    stored = (places.cache / "nodes").glob(f"node-*/{pods}")
    return {path.name for path in (*running, *stored)}
