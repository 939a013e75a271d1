"""Only an API server (with its etcd) on loopback, for integration tests: no root, no network namespace, about 3 s."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.cluster import commands
from tests.cluster.api import Api
from tests.cluster.binaries import ensure_binaries
from tests.cluster.gobuild import CONTROL_PLANE
from tests.cluster.pki import ADMIN, CONTROLLER_MANAGER, Identity, Pki
from tests.cluster.processes import tail
from tests.cluster.report import wait_until
from tests.cluster.s3 import free_ports
from tests.cluster.settings import ClusterError, digest_of


class ApiServer:
    """A real kube-apiserver with etcd on free loopback ports and a folder of its own.

    No kubelets and no scheduler: Pods stay Pending. Without the controller manager, Jobs make no Pods and deleting an
    owner leaves its dependents; service accounts are then not required for Pods.

    Example:
        with ApiServer() as server:
            server.kubectl("apply", "-f", "crds/")
    """

    def __init__(self, controller_manager: bool = False, users: Sequence[Identity] = ()) -> None:
        """Prepares, starts nothing.

        Args:
            controller_manager: also run kube-controller-manager (Jobs, garbage collection, service accounts).
            users: further identities that get a token, to test permissions; see `kubeconfig_of`.
        """
        self.with_controller_manager = controller_manager
        self.users = tuple(users)
        self._folder: Path | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "not started"
        return self._folder

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def api(self) -> Api:
        """A small JSON client with all rights."""
        return Api(self.kubeconfig)

    def kubeconfig_of(self, identity: Identity) -> Path:
        """The kubeconfig of one of the `users`, who may do only what RBAC grants them."""
        return Pki(self.folder / "pki").write_kubeconfig(
            self.folder / f"kubeconfig-{digest_of(identity.user)}", self.url, identity
        )

    def start(self) -> ApiServer:
        """Starts it and returns once it is ready and the namespace `default` exists."""
        self._binaries = ensure_binaries([CONTROL_PLANE])
        self._folder = Path(tempfile.mkdtemp(prefix="apiserver-"))
        try:
            self._start_server()
            if self.with_controller_manager:
                self._start_controller_manager()
        except BaseException:
            self.stop()
            raise
        return self

    def _start_server(self) -> None:
        pki = Pki(self.folder / "pki")
        pki.create(["127.0.0.1", "10.96.0.1"], [ADMIN, CONTROLLER_MANAGER, *self.users])
        etcd_port, peer_port, port = free_ports(3)
        self.url = f"https://127.0.0.1:{port}"
        pki.write_kubeconfig(self.kubeconfig, self.url, ADMIN)
        etcd = self._binaries.program("etcd")
        self._start("etcd", commands.etcd_command(etcd, self.folder / "etcd", etcd_port, peer_port))
        program = self._binaries.program("kube-apiserver")
        command = commands.api_server_command(program, pki.folder, etcd_port, "127.0.0.1", port)
        if not self.with_controller_manager:
            command.append("--disable-admission-plugins=ServiceAccount")
        self._start("kube-apiserver", command)
        api = self.api
        wait_until("the API server", api.is_ready, 60, 0.05, self._exited)
        wait_until("namespace default", lambda: api.get("/api/v1/namespaces/default") is not None, 30, 0.05)

    def _start_controller_manager(self) -> None:
        pki = Pki(self.folder / "pki")
        kubeconfig = pki.write_kubeconfig(self.folder / "controller-manager", self.url, CONTROLLER_MANAGER)
        program = self._binaries.program("kube-controller-manager")
        command = commands.controller_manager_command(program, pki.folder, kubeconfig, free_ports(1)[0])
        self._start("kube-controller-manager", command)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until("the default service account", lambda: self.api.get(account) is not None, 60, 0.05, self._exited)

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Runs kubectl as administrator and returns its standard output.

        Raises:
            ClusterError: with kubectl's own message, when it failed and `check` is set.
        """
        done = subprocess.run(
            [str(self._binaries.program("kubectl")), *arguments],
            input=stdin, capture_output=True, text=True, check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def pause(self) -> None:
        """Freezes the API server: connections hang as behind a broken network, until `resume`."""
        self._processes["kube-apiserver"].send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a frozen API server go on."""
        self._processes["kube-apiserver"].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kills everything and removes the folder."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as output:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder
            )

    def _exited(self) -> str | None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = self.folder / f"{name}.log"
                return f"{name} exited with {process.returncode}:\n{tail(log)}"
        return None

    def __enter__(self) -> ApiServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
