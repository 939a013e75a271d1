"""A real Kubernetes cluster on this machine: the class that tests and the command line use."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import TracebackType

from tests.cluster import images, packages, s3, settings, teardown
from tests.cluster.api import Api
from tests.cluster.binaries import Binaries, ensure_binaries
from tests.cluster.controlplane import SERVER, ControlPlane
from tests.cluster.images import Images
from tests.cluster.locks import exclusive
from tests.cluster.network import Network
from tests.cluster.nodes import Nodes, kubelet_name, stop_containers
from tests.cluster.processes import ProcessTable
from tests.cluster.report import say, step, wait_until
from tests.cluster.settings import ClusterError, Places, node_name

S3_PROCESS = "s3"
S3_INNER_PORTS = [9333, 19333, 8080, 18080, 8888, 18888, 18333]


class Cluster:
    """The one cluster of this machine; every instance looks at the same one.

    Example:
        cluster = Cluster()
        started = cluster.up(nodes=2, gpus=1)
        cluster.kubectl("get", "nodes")
        if started:
            cluster.down()
    """

    def __init__(self, places: Places | None = None) -> None:
        self.places = _adopted(places or Places.default())
        self.processes = ProcessTable(self.places.processes, self.places.run)
        self.s3_access_key = settings.S3_ACCESS_KEY
        self.s3_secret_key = settings.S3_SECRET_KEY

    @cached_property
    def binaries(self) -> Binaries:
        """The cluster's programs, found or made on first use."""
        return ensure_binaries(cache=self.places.cache)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.places.kubeconfig

    @property
    def s3_endpoint(self) -> str:
        """The S3 server's URL, the same for pods and for this machine."""
        return f"http://{settings.GATEWAY}:{settings.S3_PORT}"

    @property
    def host_address(self) -> str:
        """The address at which pods reach programs that run on this machine outside the cluster."""
        return settings.HOST_ADDRESS

    @property
    def api(self) -> Api:
        """A small JSON client of the API server with all rights."""
        return Api(self.kubeconfig)

    @property
    def _nodes(self) -> Nodes:
        return Nodes(self.places, self.binaries, self.processes, SERVER)

    def is_up(self) -> bool:
        """Whether a cluster was brought up completely and every process of it still runs."""
        if not self.places.ready_marker.exists():
            return False
        recorded = {entry.name for entry in self.processes.recorded()}
        return bool(recorded) and recorded == set(self.processes.alive())

    def up(self, nodes: int = 1, gpus: int = 0) -> bool:
        """Brings the cluster up, or adds what an already running one lacks.

        Args:
            nodes: at least so many nodes, 1 to 8.
            gpus: `nvidia.com/gpu` that every node offers; 0 leaves nodes as they are.

        Returns:
            True when this call started the cluster, which makes its caller the one to end it.

        Raises:
            ClusterError: when it can't work here or something did not start; what had been started is removed.
        """
        if not 1 <= nodes <= settings.MAX_NODES:
            raise ClusterError(f"nodes: {nodes} is not between 1 and {settings.MAX_NODES}")
        packages.require_linux_root("a cluster on this machine")
        packages.ensure_installed()
        assert self.binaries
        with self._locked():
            started = not self.is_up()
            if started:
                self._start_from_nothing(nodes)
            else:
                self._add_nodes(nodes)
            if gpus:
                for node in self.node_names():
                    self.set_gpus(node, gpus)
        return started

    def _start_from_nothing(self, nodes: int) -> None:
        stale = teardown.leftovers(self.places, self.processes)
        if stale:
            with step(f"removed what an earlier cluster left ({len(stale)} things, first: {stale[0]})"):
                teardown.remove_cluster(self.places, self.processes)
        names = [node_name(index) for index in range(nodes)]
        try:
            self._start_parts(names)
        except BaseException:
            say(f"removing the half-started cluster; logs stay in {self.places.logs}")
            teardown.remove_cluster(self.places, self.processes)
            raise
        self._mark_ready(names)

    def _start_parts(self, names: list[str]) -> None:
        for log in self.places.logs.glob("*.log"):
            log.unlink()
        plane = ControlPlane(self.places, self.binaries, self.processes)
        with step("network namespace"):
            Network(self.places).create()
        with step("etcd and API server"):
            self._start_s3()
            api = plane.start_api()
        with step("controller manager, scheduler, kube-proxy, CoreDNS"):
            plane.start_rest()
        for name in names:
            with step(f"containerd and kubelet of {name}"):
                self._nodes.start(name)
        with step("S3 server"):
            connection = s3.client(self.s3_endpoint, self.s3_access_key, self.s3_secret_key)
            wait_until("S3", lambda: s3.answers(connection), 60, 0.1, lambda: self.processes.require_alive(S3_PROCESS))
        with step("nodes Ready, default service account, DNS"):
            self._wait_ready(api, names)
            plane.wait_for_dns()

    def _start_s3(self) -> None:
        folder = self.places.data / "s3"
        s3.prepare_folder(folder, self.s3_access_key, self.s3_secret_key)
        command = s3.weed_command(s3.weed_program(), folder, settings.GATEWAY, settings.S3_PORT, S3_INNER_PORTS)
        self.processes.start(S3_PROCESS, Network(self.places).inside(command), self.places.logs / "s3.log")

    def _wait_ready(self, api: Api, names: list[str]) -> None:
        for name in names:
            wait_until(
                f"{name} to be Ready",
                lambda name=name: is_ready(api.get(f"/api/v1/nodes/{name}")),  # type: ignore[misc]
                60,
                0.1,
                lambda name=name: self.processes.require_alive(kubelet_name(name)),  # type: ignore[misc]
            )
        # a pod of the first second would be refused without it
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until("the default service account", lambda: api.get(account) is not None, 30)

    def _add_nodes(self, nodes: int) -> None:
        present = self.node_names()
        say(f"the cluster is already up with {len(present)} node(s): {', '.join(present)}")
        lacking = [name for name in map(node_name, range(nodes)) if name not in present]
        for name in lacking:
            with step(f"node {name} added"):
                self._nodes.start(name)
                self._wait_ready(self.api, [name])
        if lacking:
            self._mark_ready([*present, *lacking])

    def _mark_ready(self, names: list[str]) -> None:
        content = {"nodes": names, "cache": str(self.places.cache)}
        self.places.ready_marker.write_text(json.dumps(content))

    def down(self) -> list[str]:
        """Removes the cluster, complete or not; binaries and images stay in the cache.

        Returns:
            What there was, in words; empty when there was nothing to do.
        """
        packages.require_linux_root("ending the cluster")
        with self._locked():
            found = teardown.leftovers(self.places, self.processes)
            teardown.remove_cluster(self.places, self.processes)
        return found

    def clean(self) -> list[Path]:
        """Removes the cluster and everything that is kept between clusters, and returns the removed folders."""
        self.down()
        with exclusive(self.places.build_lock, "is building images"):
            return teardown.remove_cache(self.places)

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Runs kubectl as administrator and returns its standard output.

        Args:
            arguments: as on its command line.
            stdin: given to it as its input, for `apply -f -`.
            check: raise when it fails; otherwise its standard output is returned all the same.

        Raises:
            ClusterError: with kubectl's own message.
        """
        return self._run_tool("kubectl", arguments, stdin, check)

    def helm(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Runs helm as administrator; like `kubectl`."""
        return self._run_tool("helm", arguments, stdin, check)

    def _run_tool(self, name: str, arguments: tuple[str, ...], stdin: str | None, check: bool) -> str:
        done = subprocess.run(
            [str(self.binaries.program(name)), *arguments],
            input=stdin, capture_output=True, text=True, check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise ClusterError(f"{name} {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def node_names(self) -> list[str]:
        """The nodes the API server knows, in order."""
        listing = self.api.get("/api/v1/nodes")
        return sorted(item["metadata"]["name"] for item in listing["items"]) if listing else []

    def set_gpus(self, node: str, count: int) -> None:
        """Makes a node offer `nvidia.com/gpu`; scheduler and kubelet then count them as they count real ones."""
        quantities = {"nvidia.com/gpu": str(count)}
        code, body = self.api.request(
            "PATCH",
            f"/api/v1/nodes/{node}/status",
            {"status": {"capacity": quantities, "allocatable": quantities}},
            "application/strategic-merge-patch+json",
        )
        if code != 200:
            raise ClusterError(f"nvidia.com/gpu of {node} could not be set: {body}")

    def stop_node(self, node: str, kill_containers: bool = True) -> None:
        """Makes a node fall silent: its kubelet is killed, and its containers too unless they shall live on."""
        self.processes.stop([kubelet_name(node)], grace_seconds=0)
        if kill_containers:
            stop_containers(self.places, node)

    def start_node(self, node: str) -> None:
        """Brings a silent node back and returns once it is Ready; GPUs have to be set again."""
        self._nodes.start_kubelet(node)
        self._wait_ready(self.api, [node])

    def load_images(self) -> Images:
        """Builds the operator's and the trainer's image as far as they changed, and gives them to all nodes."""
        packages.require_linux_root("building images")
        packages.ensure_installed(for_building=True)
        with exclusive(self.places.build_lock, "is building images"):
            built = images.build_images(self.places)
            with self._locked():
                images.load_images(self.places, built, self.node_names() if self.is_up() else [])
        return built

    def _locked(self) -> AbstractContextManager[None]:
        """One change at a time on this machine."""
        return exclusive(self.places.lock, "is changing the cluster")

    def __enter__(self) -> Cluster:
        self._started_here = self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started_here:
            self.down()


def is_ready(node: object) -> bool:
    """Whether a Node object has the condition Ready."""
    if not isinstance(node, dict):
        return False
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _adopted(places: Places) -> Places:
    """The same places with the cache of the running cluster: it may have been started with another."""
    try:
        return dataclasses.replace(places, cache=Path(json.loads(places.ready_marker.read_text())["cache"]))
    except (OSError, ValueError, KeyError):
        return places
