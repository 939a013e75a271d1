"""Starting and stopping nodes: one containerd and one kubelet each."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.cluster import commands, configs, oci, settings
from tests.cluster.binaries import Binaries
from tests.cluster.containerd import Containerd
from tests.cluster.download import ARCHITECTURES
from tests.cluster.network import Network
from tests.cluster.packages import cni_plugins
from tests.cluster.pki import Pki, node_identity
from tests.cluster.processes import ProcessTable, Recorded, end_processes, start_ticks_of
from tests.cluster.report import wait_until
from tests.cluster.settings import ClusterError, Places

TOOLS_IMAGE = "localhost/busybox:1"


def containerd_name(node: str) -> str:
    return f"{node}-containerd"


def kubelet_name(node: str) -> str:
    return f"{node}-kubelet"


class Nodes:
    """The nodes of one cluster."""

    def __init__(self, places: Places, binaries: Binaries, processes: ProcessTable, server: str) -> None:
        self.places = places
        self.binaries = binaries
        self.processes = processes
        self.server = server
        self.network = Network(places)

    def start(self, node: str) -> None:
        """Starts a node's containerd and kubelet; returns when both run, not yet when the node is Ready."""
        self.start_containerd(node)
        self._load_tools(node)
        self.start_kubelet(node)

    def start_containerd(self, node: str) -> Containerd:
        """Starts containerd and returns once it serves, without containers of an earlier, killed cluster.

        containerd reads its containers once at its start: after a clean-up it is started again, else its
        Kubernetes part would go on showing what is gone.
        """
        containerd = self._run_containerd(node)
        if containerd.forget_containers():
            self.processes.stop([containerd_name(node)], grace_seconds=5)
            containerd = self._run_containerd(node)
        return containerd

    def _run_containerd(self, node: str) -> Containerd:
        plugins = cni_plugins()
        assert plugins is not None, "checked before the cluster is started"
        data = self.places.node_data(node)
        (data / "cni").mkdir(parents=True, exist_ok=True)
        (data / "cni" / "10-pods.conflist").write_text(configs.cni_config(self.places))
        (data / "containerd.toml").write_text(configs.containerd_config(self.places, node, plugins))
        self.places.node_run(node).mkdir(parents=True, exist_ok=True)
        self.places.node_store(node).mkdir(parents=True, exist_ok=True)
        name = containerd_name(node)
        command = ["containerd", "-c", str(data / "containerd.toml")]
        self.processes.start(name, self.network.inside(command), self.places.logs / f"{name}.log")
        containerd = Containerd(self.places.containerd_socket(node))
        wait_until(f"{name}", containerd.is_serving, 60, 0.1, lambda: self.processes.require_alive(name))
        return containerd

    def start_kubelet(self, node: str) -> None:
        """Starts a kubelet; also what brings back a node whose kubelet was stopped."""
        index = int(node.rsplit("-", 1)[1]) - 1
        data = self.places.node_data(node)
        (data / "kubelet.yaml").write_text(
            configs.kubelet_config(self.places, node, settings.FIRST_KUBELET_PORT + index)
        )
        kubeconfig = Pki(self.places.pki).write_kubeconfig(
            self.places.data / "kubeconfigs" / node, self.server, node_identity(node)
        )
        command = commands.kubelet_command(self.binaries.program("kubelet"), self.places, node, kubeconfig)
        name = kubelet_name(node)
        self.processes.start(name, self.network.inside(command), self.places.logs / f"{name}.log")

    def _load_tools(self, node: str) -> None:
        """Imports the pause container's image, which is also the tests' tool box, once per node store."""
        image, layer = tools_image()
        marker = self.places.node_store(node) / f"tools-{settings.digest_of(image.manifest)}"
        if marker.exists():
            return
        containerd = Containerd(self.places.containerd_socket(node))
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "tools.tar"
            for reference in (configs.PAUSE_IMAGE, TOOLS_IMAGE):
                oci.write_archive(archive, reference, image, [layer])
                containerd.run("images", "import", archive)
        marker.touch()


def tools_image() -> tuple[oci.Image, bytes]:
    """The tool box image made of this machine's own busybox, and its layer."""
    program = shutil.which("busybox")
    if program is None:
        raise ClusterError("busybox not found; the pause container is made of it (Debian package: busybox)")
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    files = {"/bin/busybox": Path(program).read_bytes()}
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for library in linked_libraries(linked):
        files[library] = Path(library).read_bytes()
    return oci.busybox_image(files, applets, ARCHITECTURES[platform.machine().lower()])


def linked_libraries(listing: str) -> list[str]:
    """The library paths in the output of `ldd`; none for a program that needs none."""
    found = re.findall(r"(?:=> )?(/\S+) \(0x[0-9a-f]+\)", listing)
    return sorted(set(found))


def container_processes(state: Path) -> list[Recorded]:
    """The first process of every running container, from containerd's state folder.

    Works without containerd. An id is taken only when that process is in a control group named after the
    container: the files outlive their processes.
    """
    found = []
    for file in state.glob("io.containerd.runtime.v2.task/*/*/init.pid"):
        container = file.parent.name
        try:
            pid = int(file.read_text())
            groups = Path(f"/proc/{pid}/cgroup").read_text()
        except (OSError, ValueError):
            continue
        ticks = start_ticks_of(pid)
        if ticks is not None and container in groups:
            found.append(Recorded(container, pid, ticks))
    return found


def stop_containers(places: Places, node: str) -> None:
    """Kills a node's containers and forgets them while their containerd can still be asked to."""
    end_processes(container_processes(places.node_run(node) / "state"), grace_seconds=0)
    address = places.containerd_socket(node)
    if is_listened_on(address):
        Containerd(address).forget_containers()


def is_listened_on(path: Path) -> bool:
    """Whether somebody listens on a socket file; `ctr` would wait ten seconds to find out."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        try:
            connection.connect(os.fspath(path))
        except OSError:
            return False
    return True
