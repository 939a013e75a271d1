"""The chart: what it renders, what it refuses, and that it is the same product as the code beside it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_api.problems import parse
from lora_api.profile import LoRATrainingProfile
from tests.cluster.binaries import ensure_binaries
from tests.cluster.gobuild import HELM

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "lora-operator"
STORE = {
    "name": "default",
    "endpoint": "https://minio.storage.svc:9000",
    "bucket": "lora",
    "credentials": {"operatorSecretName": "operator-store", "jobSecretName": "job-store"},
}


@cache
def helm_program() -> str:
    return str(ensure_binaries([HELM]).program("helm"))


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm_program(), *arguments, "-f", "-"],
        input=yaml.safe_dump(values or {}),
        capture_output=True,
        text=True,
        check=False,
    )


def render(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    done = helm("template", "rel", str(CHART), "--namespace", "ops", values=values)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


@pytest.mark.parametrize("values", [{}, {"profile": {"stores": [STORE]}, "watchNamespaces": ["team-a"]}])
def test_helm_finds_nothing_to_complain_about(values: dict[str, Any]) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout


def test_the_chart_has_the_version_of_the_code() -> None:
    import tomllib

    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    assert chart["version"] == version


def test_one_operator_at_a_time_locked_down_and_probed() -> None:
    (deployment,) = of_kind(render(), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["command"] == ["lora-operator", "serve"], "exec form: SIGTERM reaches the process"
    assert {"livenessProbe", "readinessProbe", "startupProbe", "resources"} <= container.keys()


def test_the_arguments_of_the_deployment_are_options_of_the_command() -> None:
    import typer
    from typer.testing import CliRunner

    from lora_operator import serve

    (deployment,) = of_kind(render({"watchNamespaces": ["team-a", "team-b"], "logFormat": "json"}), "Deployment")
    seen: list[serve.Options] = []
    app = typer.Typer()
    app.command()(serve.main)

    async def note(options: serve.Options) -> None:
        seen.append(options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "serve", note)
        patch.setattr(serve, "configure_logging", lambda *_: None)
        done = CliRunner().invoke(app, deployment["spec"]["template"]["spec"]["containers"][0]["args"])
    assert done.exit_code == 0, done.output
    assert seen[0].namespaces == ("team-a", "team-b")


def test_without_stores_there_is_no_profile_and_with_stores_it_is_a_valid_one() -> None:
    assert of_kind(render(), "LoRATrainingProfile") == []
    values = {
        "profile": {
            "name": "gold",
            "stores": [STORE],
            "sizing": {"gpusPerNode": 2},
            "backoff": {"initialSeconds": 5},
            "trainer": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "env": {"A": "b"}},
        }
    }
    (manifest,) = of_kind(render(values), "LoRATrainingProfile")
    profile = parse(LoRATrainingProfile, manifest)
    assert profile.metadata.name == "gold"
    assert profile.spec.sizing.gpus_per_node == 2
    assert profile.spec.trainer.image, "the default image stays when other trainer fields are given"
    store = profile.spec.store("default")
    assert store is not None
    assert store.credentials.job_secret_name == "job-store"


def rules_of(manifests: list[dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    (role,) = [role for role in of_kind(manifests, kind) if role["metadata"]["name"] == name]
    return role["rules"]


def test_no_right_is_a_wildcard_and_secrets_are_only_read() -> None:
    manifests = render()
    for kind in ("ClusterRole", "Role"):
        for role in of_kind(manifests, kind):
            for rule in role["rules"]:
                assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
                if "secrets" in rule["resources"]:
                    assert rule["verbs"] == ["get"]


@pytest.mark.parametrize(
    ("values", "jobs", "own"),
    [
        ({}, None, None),
        ({"profile": {"stores": [STORE]}}, ["job-store"], ["operator-store"]),
        ({"profile": {"stores": [STORE]}, "rbac": {"jobSecretNames": ["*"]}}, None, ["operator-store"]),
        ({"rbac": {"jobSecretNames": ["b", "a"], "operatorSecretNames": ["c"]}}, ["a", "b"], ["c"]),
    ],
)
def test_of_secrets_only_those_that_stores_name_may_be_read(values: Any, jobs: Any, own: Any) -> None:
    manifests = render(values)
    (in_teams,) = [
        r for r in rules_of(manifests, "ClusterRole", "rel-lora-operator-jobs") if "secrets" in r["resources"]
    ]
    (in_ops,) = rules_of(manifests, "Role", "rel-lora-operator-stores")
    assert in_teams.get("resourceNames") == jobs
    assert in_ops.get("resourceNames") == own


def test_with_namespaces_there_are_no_rights_outside_of_them() -> None:
    manifests = render({"watchNamespaces": ["team-a", "team-b"]})
    assert [b["metadata"]["name"] for b in of_kind(manifests, "ClusterRoleBinding")] == ["rel-lora-operator-profiles"]
    bound = {(b["metadata"]["namespace"], b["roleRef"]["name"]) for b in of_kind(manifests, "RoleBinding")}
    assert bound == {
        ("team-a", "rel-lora-operator-jobs"),
        ("team-b", "rel-lora-operator-jobs"),
        ("ops", "rel-lora-operator-stores"),
    }


def test_bindings_and_deployment_name_the_same_service_account() -> None:
    for values, name in (({}, "rel-lora-operator"), ({"serviceAccount": {"create": False, "name": "mine"}}, "mine")):
        manifests = render(values)
        (deployment,) = of_kind(manifests, "Deployment")
        assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == name
        bindings = of_kind(manifests, "ClusterRoleBinding") + of_kind(manifests, "RoleBinding")
        assert {(s["name"], s["namespace"]) for b in bindings for s in b["subjects"]} == {(name, "ops")}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": 2}, "replicas"),
        ({"logFormat": "xml"}, "logFormat"),
        ({"profile": {"stores": [{**STORE, "endpoint": "minio:9000"}]}}, "endpoint"),
        ({"profile": {"stores": [{**STORE, "acessKey": "x"}]}}, "acessKey"),
        ({"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}}, "serviceMonitor"),
    ],
)
def test_values_that_can_not_be_meant_are_refused(values: dict[str, Any], words: str) -> None:
    done = helm("template", "rel", str(CHART), values=values)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_crds_of_the_chart_are_the_generated_ones() -> None:
    for generated in (REPOSITORY / "crds").glob("*.yaml"):
        assert (CHART / "crds" / generated.name).read_text() == generated.read_text()


def test_the_monitor_selects_the_metrics_service() -> None:
    manifests = render({"metrics": {"serviceMonitor": {"enabled": True}}})
    (monitor,), (service,) = of_kind(manifests, "ServiceMonitor"), of_kind(manifests, "Service")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["name"] == monitor["spec"]["endpoints"][0]["port"]
