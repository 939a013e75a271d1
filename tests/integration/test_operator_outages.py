"""What the operator does while the API server is away, and when a watch dies for good."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.report import wait_until
from tests.cluster.s3 import SeaweedS3
from tests.contract.cluster_objects import a_job, a_secret
from tests.integration.operator_process import ACCOUNT, BUCKET, SYSTEM, Hands, Operator, eventually, install_chart


@pytest.fixture
def team(s3: SeaweedS3) -> Iterator[Hands]:
    """A cluster of the test's own: it will not be the same afterwards."""
    with ApiServer(users=[ACCOUNT]) as server:
        names = {"operatorSecretName": "store", "jobSecretName": "store"}
        store = {"name": "default", "endpoint": s3.endpoint, "bucket": BUCKET, "credentials": names}
        values = {"profile": {"stores": [store]}, "watchNamespaces": ["team-a"]}
        server.kubectl("create", "namespace", "team-a")
        server.kubectl("create", "namespace", "team-b")
        install_chart(server, values)
        for namespace in ("team-a", "team-b", SYSTEM):
            secret = a_secret(namespace=namespace, accessKey=s3.access_key, secretKey=s3.secret_key)
            server.kubectl("create", "-f", "-", stdin=json.dumps(secret))
        yield Hands(server, "team-a")


def stop_api_server(server: ApiServer) -> list[str]:
    """Kills the API server as a crash would; returns the command that starts it."""
    process = server._processes["kube-apiserver"]
    process.kill()
    process.wait()
    return list(process.args)  # type: ignore[arg-type]


def start_api_server(server: ApiServer, command: list[str]) -> None:
    server._start("kube-apiserver", command)
    wait_until("the API server", server.api.is_ready, 60, 0.05)


def test_an_api_server_that_restarts_loses_no_job_and_costs_no_restart(team: Hands, tmp_path: Path) -> None:
    with Operator(team.server, tmp_path, "--namespace=team-a") as operator:
        team.apply(a_job("before", namespace="team-a"))
        eventually("the first child", lambda: team.child("before-1"))
        command = stop_api_server(team.server)
        time.sleep(8)
        assert operator.health() == 200, "a restart of the operator would not bring the API server back"
        start_api_server(team.server, command)
        team.apply(a_job("after", namespace="team-a"))
        eventually("the second child", lambda: team.child("after-1"), 45)
        team.patch("before", {"spec": {"runPolicy": {"suspend": True}}})
        eventually("the first child is gone", lambda: team.child("before-1") is None, 20)
        assert operator.health() == 200
        assert "Traceback" not in operator.text()


def test_a_server_that_hangs_is_survived(team: Hands, tmp_path: Path) -> None:
    with Operator(team.server, tmp_path, "--namespace=team-a") as operator:
        team.server.pause()
        time.sleep(5)
        team.server.resume()
        team.apply(a_job(namespace="team-a"))
        eventually("the child", lambda: team.child("mascot-1"), 45)
        assert operator.health() == 200


def test_outside_of_its_namespaces_it_does_nothing_and_may_do_nothing(team: Hands, tmp_path: Path) -> None:
    other = Hands(team.server, "team-b")
    other.apply(a_job(namespace="team-b"))
    with Operator(team.server, tmp_path, "--namespace=team-a") as operator:
        team.apply(a_job(namespace="team-a"))
        eventually("the child", lambda: team.child("mascot-1"))
        assert other.children() == []
        assert "forbidden" not in operator.text()
    rights = f"--as={ACCOUNT.user}"
    assert team.server.kubectl("auth", "can-i", "create", "jobs", "-n", "team-a", rights, check=False).strip() == "yes"
    assert team.server.kubectl("auth", "can-i", "create", "jobs", "-n", "team-b", rights, check=False).strip() == "no"
    assert team.server.kubectl("auth", "can-i", "get", "secrets", "-n", "team-a", rights, check=False).strip() == "no"


def test_a_watch_that_dies_for_good_ends_the_process_or_fails_liveness(team: Hands, tmp_path: Path) -> None:
    with Operator(team.server, tmp_path, "--namespace=team-a") as operator:
        assert operator.health() == 200
        team.server.kubectl("delete", "crd", "loratrainingprofiles.lora-operator.io")
        assert operator.process is not None
        process = operator.process
        eventually("a new process is asked for", lambda: process.poll() == 1 or operator.health() == 500, 60)
        assert "watcher for loratrainingprofiles" in operator.text().lower()


def test_without_crds_it_says_what_to_install_and_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_operator.serve._WAIT_FOR_CRDS_SECONDS", 0.5)
    with ApiServer(users=[ACCOUNT]) as server:
        from lora_operator.adapters.kube_api import ClusterError
        from lora_operator.serve import Options, serve

        async def run() -> None:
            await serve(Options(kubeconfig=server.kubeconfig))

        import asyncio

        with pytest.raises(ClusterError, match=r"does not serve loratrainingjobs, loratrainingprofiles.*crds/"):
            asyncio.run(run())
