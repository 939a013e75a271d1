"""An API server with our CRDs, and the adapter on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lora_operator.adapters.clock import SystemClock
from lora_operator.adapters.kube import KubeCluster
from lora_operator.adapters.kube_api import KubeApi
from tests.cluster.apiserver import ApiServer
from tests.cluster.report import wait_until
from tests.contract.cluster_objects import NAMESPACE
from tests.contract.cluster_worlds import RealWorld

CRDS = Path(__file__).resolve().parents[2] / "crds"


@pytest.fixture(scope="session")
def crd_server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        for crd in sorted(CRDS.glob("*.yaml")):
            server.kubectl("apply", "-f", str(crd))
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        for name in (NAMESPACE, "team-b"):
            server.kubectl("create", "namespace", name)
        for path in ("loratrainingjobs", "loratrainingprofiles"):  # "storage is (re)initializing" until then
            where = f"/apis/lora-operator.io/v1alpha1/{path}"
            wait_until(path, lambda where=where: server.api.get(where) is not None, 30)
        yield server


@pytest.fixture
async def real(crd_server: ApiServer) -> AsyncIterator[RealWorld]:
    api = await KubeApi.connect(crd_server.kubeconfig)
    world = RealWorld(crd_server, KubeCluster(api, SystemClock(), instance="operator-0"))
    yield world
    await api.close()
    world.wipe()
