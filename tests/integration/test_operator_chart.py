"""The chart installed by Helm into a real API server: everything in one go, accepted by the restricted pod security."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.apiserver import ApiServer
from tests.cluster.binaries import ensure_binaries
from tests.cluster.gobuild import HELM
from tests.integration.operator_process import ACCOUNT, CHART, SYSTEM, render_chart

STORE = {
    "name": "default",
    "endpoint": "https://minio.storage.svc:9000",
    "bucket": "lora",
    "credentials": {"operatorSecretName": "operator-store", "jobSecretName": "job-store"},
}
VALUES = {"profile": {"stores": [STORE]}}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(users=[ACCOUNT]) as server:
        yield server


def helm(server: ApiServer, *arguments: str) -> str:
    done = subprocess.run(
        [str(ensure_binaries([HELM]).program("helm")), *arguments, "--namespace", SYSTEM],
        input=yaml.safe_dump(VALUES),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KUBECONFIG": str(server.kubeconfig)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_command_installs_crds_profile_rights_and_operator(server: ApiServer) -> None:
    said = helm(server, "install", "lora-operator", str(CHART), "--create-namespace", "-f", "-")
    assert "create secret generic operator-store" in said
    assert "create secret generic job-store" in said
    assert "kubectl --namespace TEAM get loratrainingjobs --watch" in said
    assert server.kubectl("get", "loratrainingprofile", "default", "-o", "jsonpath={.spec.stores[0].bucket}") == "lora"
    assert server.kubectl("get", "deployment", "-n", SYSTEM, "-o", "name") == "deployment.apps/lora-operator\n"
    helm(server, "upgrade", "lora-operator", str(CHART), "-f", "-", "--set", "workers=4")
    assert "--workers=4" in server.kubectl("get", "deployment", "-n", SYSTEM, "-o", "yaml")


def test_the_operators_pod_is_accepted_by_the_restricted_pod_security(server: ApiServer) -> None:
    server.kubectl("create", "namespace", "strict")
    server.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    (deployment,) = render_chart(VALUES, "deployment.yaml")
    template = deployment["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": template["spec"]}
    server.kubectl("create", "-n", "strict", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "may"),
    [
        ("get", "secrets/job-store", "strict", "yes"),
        ("get", "secrets/other", "strict", "no"),
        ("list", "secrets", "strict", "no"),
        ("get", "secrets/operator-store", SYSTEM, "yes"),
        ("get", "secrets/operator-store", "strict", "no"),
        ("create", "pods", "strict", "no"),
        ("delete", "pods", "strict", "no"),
        ("update", "loratrainingjobs.lora-operator.io", "strict", "no"),
        ("delete", "loratrainingjobs.lora-operator.io", "strict", "no"),
        ("update", "jobs.batch", "strict", "no"),
        ("update", "loratrainingprofiles.lora-operator.io", "", "no"),
        ("list", "namespaces", "", "no"),
        ("list", "customresourcedefinitions.apiextensions.k8s.io", "", "no"),
    ],
)
def test_the_operator_may_do_what_it_does_and_no_more(
    server: ApiServer, verb: str, resource: str, namespace: str, may: str
) -> None:
    place = ["-n", namespace] if namespace else []
    said = server.kubectl("auth", "can-i", verb, resource, *place, f"--as={ACCOUNT.user}", check=False)
    assert said.strip() == may


def test_uninstalling_leaves_the_crds_and_so_the_jobs(server: ApiServer) -> None:
    helm(server, "uninstall", "lora-operator")
    assert "loratrainingjobs.lora-operator.io" in server.kubectl("get", "crd", "-o", "name")
    assert server.kubectl("get", "clusterrole", "-o", "name", "-l", "app.kubernetes.io/name=lora-operator") == ""
