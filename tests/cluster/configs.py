"""The configuration files of the components, as pure functions of where things are."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cluster import settings
from tests.cluster.settings import Places

PAUSE_IMAGE = "localhost/pause:1"
POD_NETWORK_NAME = "lora-pods"


def kubelet_config(places: Places, node: str, port: int) -> str:
    """The kubelet's configuration file.

    The switched-off parts are those that need to own the machine's control groups or swap: a kubelet beside a
    person's other work must not.
    """
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failSwapOn": False,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "containerRuntimeEndpoint": f"unix://{places.containerd_socket(node)}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(places.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        # images are kept between clusters and removed by this tool, never by the kubelet
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "port": port,
        "healthzPort": 0,
        "clusterDNS": [settings.GATEWAY],
        "clusterDomain": "cluster.local",
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": False,
        "maxPods": 60,
        "podLogsDir": str(places.node_data(node) / "pod-logs"),
        "volumePluginDir": str(places.node_data(node) / "volume-plugins"),
        "serializeImagePulls": False,
    }
    return yaml.safe_dump(config, sort_keys=False)


def containerd_config(places: Places, node: str, cni_plugins: Path) -> str:
    """containerd's configuration; each node has its own instance with its own store and sockets."""
    run, store = places.node_run(node), places.node_store(node)
    unused = ["aufs", "btrfs", "devmapper", "zfs"]
    disabled = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in unused)
    return f"""version = 2
root = "{store}"
state = "{run}/state"
disabled_plugins = [{disabled}, "io.containerd.nri.v1.nri"]

[grpc]
  address = "{places.containerd_socket(node)}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{store}/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # where negative OOM scores are refused, runc dies without this: "can't get final child's PID from pipe"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_plugins}"
    conf_dir = "{places.node_data(node)}/cni"
"""


def cni_config(places: Places) -> str:
    """One flat pod network for all nodes; no masquerading and no default route of the outer machine behind it."""
    bridge = {
        "type": "bridge",
        "bridge": settings.BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(places.run / "ipam"),
            "ranges": [[{"subnet": settings.POD_NETWORK, "rangeStart": settings.FIRST_POD_ADDRESS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": POD_NETWORK_NAME, "plugins": [bridge]}, indent=1)


def proxy_config(kubeconfig: Path, node: str) -> str:
    """kube-proxy's configuration; one instance serves all nodes, since they share one network namespace."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": settings.POD_NETWORK,
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        # answers from a pod on the same bridge would bypass the address translation where the kernel does not
        # send bridged packets through iptables
        "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return yaml.safe_dump(config, sort_keys=False)


def corefile(kubeconfig: Path) -> str:
    """CoreDNS for the cluster's own names; all else is answered with "no such name", never asked elsewhere."""
    return f""".:53 {{
  bind {settings.GATEWAY}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
    ttl 2
  }}
  cache 2
}}
"""
