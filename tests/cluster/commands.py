"""The command lines of the components, as pure functions."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import settings
from tests.cluster.settings import Places

Command = list[str]


def etcd_command(program: Path, data: Path, client_port: int, peer_port: int) -> Command:
    """etcd on loopback; without fsync, because its data dies with the cluster anyway."""
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(program),
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server_command(program: Path, pki: Path, etcd_port: int, bind_address: str, port: int) -> Command:
    """The part of the API server's command line that a cluster and a lone API server share."""
    return [
        str(program),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--bind-address={bind_address}",
        f"--secure-port={port}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--token-auth-file={pki}/tokens.csv",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-cluster-ip-range={settings.SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--profiling=false",
        # a graceful stop would wait for watches that nobody will miss
        "--shutdown-delay-duration=0s",
    ]


def cluster_api_server_flags(pki: Path) -> Command:
    """What only an API server with kubelets, pods and aggregated APIs behind it needs."""
    return [
        f"--advertise-address={settings.GATEWAY}",
        "--enable-admission-plugins=NodeRestriction",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        f"--kubelet-client-key={pki}/kubelet-client.key",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
    ]


def controller_manager_command(program: Path, pki: Path, kubeconfig: Path, port: int) -> Command:
    """The controller manager; a silent node is noticed in 20 s, so that tests of node loss stay short."""
    return [
        str(program),
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=20s",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--profiling=false",
    ]


def scheduler_command(program: Path, kubeconfig: Path) -> Command:
    """The scheduler as it comes: preemption by PriorityClass included."""
    return [
        str(program),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--secure-port=10259",
        "--profiling=false",
    ]


def kubelet_command(program: Path, places: Places, node: str, kubeconfig: Path) -> Command:
    """One kubelet. All share one address, which must not be loopback, and differ in their ports."""
    return [
        str(program),
        f"--config={places.node_data(node)}/kubelet.yaml",
        f"--kubeconfig={kubeconfig}",
        f"--root-dir={places.node_data(node)}/kubelet",
        f"--cert-dir={places.node_data(node)}/kubelet-pki",
        f"--hostname-override={node}",
        f"--node-ip={settings.GATEWAY}",
        "--v=1",
    ]
