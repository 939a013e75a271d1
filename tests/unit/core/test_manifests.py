"""Child objects, held against files in golden/. `UPDATE_GOLDEN=1 pytest tests/unit/core/test_manifests.py` writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_api import names
from lora_api.job import LoRATrainingJob
from lora_api.run import RunConfig
from lora_operator.core.manifests import build_attempt, grace_seconds
from tests.unit.builders import JobBuilder, ProfileBuilder, beat

GOLDEN = Path(__file__).with_name("golden")

CASES: dict[str, tuple[JobBuilder, ProfileBuilder, int]] = {
    "one-pod": (JobBuilder(), ProfileBuilder(), 1),
    "two-nodes-queued": (
        JobBuilder().named("7days.of-mascot").on(nodes=2).with_policy(queueName="gpu", priorityClassName="batch"),
        ProfileBuilder()
        .with_sizing(gpusPerNode=4, cpu="16", memory="200Gi")
        .with_trainer(
            nodeSelector={"gpu": "h200"},
            tolerations=[{"key": "gpu", "operator": "Exists"}],
            imagePullSecrets=["registry"],
            env={"NCCL_DEBUG": "WARN"},
        ),
        12,
    ),
    "on-the-cpu": (
        JobBuilder().with_output(path="a/b"),
        ProfileBuilder().with_sizing(gpusPerNode=0).with_trainer(image="trainer:cpu"),
        2,
    ),
}


def built(name: str) -> tuple[dict[str, Any], ...]:
    job, profile, attempt = CASES[name]
    parsed = profile.build()
    return build_attempt(job.build(), parsed, parsed.spec.stores[0], attempt)


@pytest.mark.parametrize("name", CASES)
def test_an_attempt_is_made_of_what_the_golden_file_says(name: str) -> None:
    made, file = list(built(name)), GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(yaml.dump_all(made, Dumper=_Readable, sort_keys=False, width=120))
    assert made == list(yaml.safe_load_all(file.read_text()))


class _Readable(yaml.SafeDumper):
    """No anchors, and text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Readable.add_representer(str, _Readable.represent_text)


@pytest.mark.parametrize("name", CASES)
def test_the_three_objects_share_name_owner_and_labels_but_no_memory(name: str) -> None:
    made = built(name)
    metadata = [manifest["metadata"] for manifest in made]
    assert len({m["name"] for m in metadata}) == 1
    assert all(m["ownerReferences"][0]["uid"] == CASES[name][0].build().metadata.uid for m in metadata)
    assert metadata[0] is not metadata[1]
    selector = made[1]["spec"]["selector"].items()
    assert selector <= made[2]["spec"]["template"]["metadata"]["labels"].items()


def test_the_run_configuration_can_be_read_by_the_trainer() -> None:
    config_map, _, job = built("two-nodes-queued")
    run = RunConfig.model_validate_json(config_map["data"]["run.json"])
    assert (run.nodes, run.processes_per_node, run.attempt) == (2, 4, 12)
    assert run.path == "team-a/7days.of-mascot"
    assert run.stores == (run.store,)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--nnodes={run.nodes}" in command
    assert f"--nproc-per-node={run.processes_per_node}" in command


def test_the_run_configuration_names_no_secret_value() -> None:
    assert "accessKey" not in built("one-pod")[0]["data"]["run.json"]


def test_pods_get_no_token_no_privilege_and_a_read_only_root() -> None:
    pod = built("one-pod")[2]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_failed_pod_is_never_replaced_and_the_job_remembers_why() -> None:
    spec = built("one-pod")[2]["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    codes = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert codes == sorted(set(codes))
    assert 0 not in codes
    assert all(rule["action"] == "FailJob" for rule in spec["podFailurePolicy"]["rules"])


@pytest.mark.parametrize(
    ("measured", "grace"), [(None, 120), (0.0, 120), (10.0, 120), (30.0, 120), (30.1, 121), (400.0, 1230)]
)
def test_the_grace_period_covers_the_longest_save(measured: float | None, grace: int) -> None:
    assert grace_seconds(ProfileBuilder().build(), beat(1, save_seconds=measured)) == grace


@pytest.mark.parametrize("name", ["a", "a" * 253, "1" * 60, "a.b", "x" * 41, "a-" + "b.c" * 20])
@pytest.mark.parametrize("attempt", [1, 99, 123_456_789])
def test_names_stay_legal_for_every_job_and_attempt(name: str, attempt: int) -> None:
    job: LoRATrainingJob = JobBuilder().named(name).build()
    profile = ProfileBuilder().build()
    for manifest in build_attempt(job, profile, profile.spec.stores[0], attempt):
        child = manifest["metadata"]["name"]
        assert names._DNS_LABEL.match(child)
        assert len(f"{child}-63") <= 63
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())
