"""The clusters that the suite of the port is run against, and the hands of everybody else in them."""

from __future__ import annotations

from typing import Any, Protocol

from lora_operator.adapters.kube import KubeCluster
from lora_operator.core.views import Manifest
from lora_operator.ports import Cluster
from tests.cluster.apiserver import ApiServer
from tests.contract.cluster_objects import NAMESPACE
from tests.contract.fake_cluster import FakeCluster

PATHS = {
    "LoRATrainingJob": "/apis/lora-operator.io/v1alpha1/{}loratrainingjobs",
    "LoRATrainingProfile": "/apis/lora-operator.io/v1alpha1/loratrainingprofiles",
    "Job": "/apis/batch/v1/{}jobs",
    "Pod": "/api/v1/{}pods",
    "Service": "/api/v1/{}services",
    "ConfigMap": "/api/v1/{}configmaps",
    "Secret": "/api/v1/{}secrets",
    "Event": "/api/v1/{}events",
}


class World(Protocol):
    """The cluster under test, and the hands of everybody else in it."""

    cluster: Cluster
    real: bool

    def seed(self, manifest: Manifest) -> Manifest: ...
    def fetch(self, kind: str, namespace: str, name: str) -> Manifest | None: ...
    def remove(self, kind: str, namespace: str, name: str) -> None: ...


class FakeWorld:
    real = False

    def __init__(self) -> None:
        self.cluster = self.fake = FakeCluster()

    def seed(self, manifest: Manifest) -> Manifest:
        return self.fake.apply(manifest)

    def fetch(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self.fake.get(kind, namespace, name)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        self.fake.delete(kind, namespace, name)


class RealWorld:
    real = True

    def __init__(self, server: ApiServer, cluster: KubeCluster) -> None:
        self.api, self.cluster = server.api, cluster

    def path(self, kind: str, namespace: str, name: str = "") -> str:
        collection = PATHS[kind].format(f"namespaces/{namespace}/" if namespace else "")
        return f"{collection}/{name}" if name else collection

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        code, answer = self.api.request(method, path, body)
        assert code < 300, answer
        return answer

    def seed(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        return self.ask("POST", self.path(manifest["kind"], metadata.get("namespace", "")), manifest)

    def fetch(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self.api.get(self.path(kind, namespace, name))

    def remove(self, kind: str, namespace: str, name: str) -> None:
        # a Job deleted without a policy would wait for a controller that is not here
        self.ask(
            "DELETE", self.path(kind, namespace, name), {"propagationPolicy": "Background", "gracePeriodSeconds": 0}
        )

    def wipe(self) -> None:
        for kind, path in PATHS.items():
            for namespace in (NAMESPACE, "team-b") if "{}" in path else ("",):
                for item in self.ask("GET", self.path(kind, namespace))["items"]:
                    self.remove(kind, namespace, item["metadata"]["name"])
