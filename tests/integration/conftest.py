"""A real API server with the chart's rights and profile, a real S3 server, and a namespace for each test."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.s3 import SeaweedS3
from tests.contract.cluster_objects import a_secret
from tests.integration.operator_process import ACCOUNT, BUCKET, SYSTEM, Hands, install_chart

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def s3() -> Iterator[SeaweedS3]:
    with SeaweedS3(buckets=[BUCKET]) as s3:
        yield s3


@pytest.fixture(scope="module")
def chart_server(s3: SeaweedS3) -> Iterator[ApiServer]:
    """An API server with everything of the chart but its Deployment."""
    store = {
        "name": "default",
        "endpoint": s3.endpoint,
        "bucket": BUCKET,
        "credentials": {"operatorSecretName": "store", "jobSecretName": "store"},
    }
    sizing = {"gpusPerNode": 0, "cpu": "1", "memory": "1Gi"}
    with ApiServer(users=[ACCOUNT]) as server:
        install_chart(server, {"profile": {"stores": [store], "sizing": sizing}})
        secret = a_secret(namespace=SYSTEM, accessKey=s3.access_key, secretKey=s3.secret_key)
        server.kubectl("create", "-f", "-", stdin=json.dumps(secret))
        yield server


@pytest.fixture
def team(chart_server: ApiServer, s3: SeaweedS3) -> Iterator[Hands]:
    """A namespace of the test's own, with the Secret that trainer pods mount; its jobs go with the test."""
    namespace = f"team-{next(_numbers)}"
    chart_server.kubectl("create", "namespace", namespace)
    secret = a_secret(namespace=namespace, accessKey=s3.access_key, secretKey=s3.secret_key)
    chart_server.kubectl("create", "-f", "-", stdin=json.dumps(secret))
    team = Hands(chart_server, namespace)
    yield team
    team.clean_up()
