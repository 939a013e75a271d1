"""What a person sees: `kubectl get`, `apply`, `explain`, at every moment of a job's life."""

from __future__ import annotations

import json

import pytest
import yaml

from lora_api.crd import job_crd, profile_crd
from lora_api.job import (
    CheckpointsStatus,
    Condition,
    ConditionType,
    JobStatus,
    LedgerEntry,
    OutputStatus,
    Phase,
    ProgressStatus,
    Restarts,
    status_to_wire,
)
from tests.bad_manifests import JOB, PROFILE, changed
from tests.cluster.apiserver import ApiServer
from tests.cluster.settings import REPOSITORY, ClusterError

STATUS = "/apis/lora-operator.io/v1alpha1/namespaces/default/loratrainingjobs/{}/status"


@pytest.fixture(scope="module")
def server():
    with ApiServer() as running:
        running.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
        for crd in (job_crd(), profile_crd()):
            running.kubectl("wait", "--for=condition=Established", "crd", crd["metadata"]["name"], "--timeout=30s")
        yield running


@pytest.fixture
def kubectl(server):
    yield server.kubectl
    server.kubectl("delete", "ltj,ltp", "--all", "--all-namespaces")


def write_status(server, name, status):
    path = STATUS.format(name)
    job = server.api.get(path)
    code, answer = server.api.request("PUT", path + "?fieldValidation=Strict", job | {"status": status_to_wire(status)})
    assert code == 200, answer
    return answer


def cells(table):
    return [line.split() for line in table.strip().splitlines()]


def test_a_new_job_shows_as_pending_before_the_operator_has_seen_it(kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    header, row = cells(kubectl("get", "ltj"))
    assert header == ["NAME", "PHASE", "MODEL", "STEP", "PROGRESS", "LOSS", "ETA", "RESTARTS", "AGE"]
    assert row[:4] == ["mascot", "Pending", "zimage", "0"]


def test_kstatus_takes_a_job_that_the_operator_has_not_seen_for_one_in_progress(kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    job = json.loads(kubectl("get", "ltj", "mascot", "-o", "json"))
    assert job["status"]["observedGeneration"] < job["metadata"]["generation"]


def test_a_running_job_shows_all_its_columns(server, kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    write_status(
        server,
        "mascot",
        JobStatus(
            observed_generation=1,
            phase=Phase.RUNNING,
            stage="Training",
            attempt=2,
            restarts=Restarts(preemption=1),
            restarts_total=1,
            progress=ProgressStatus(step=450, steps=1000, percent="45%", loss="0.3512", eta="1h12m"),
            output=OutputStatus(location="s3://runs/default/mascot/"),
        ),
    )
    header, row = cells(kubectl("get", "ltj", "-o", "wide"))
    assert dict(zip(header, row, strict=True)) | {"AGE": ""} == {
        "NAME": "mascot",
        "PHASE": "Running",
        "MODEL": "zimage",
        "STEP": "450",
        "PROGRESS": "45%",
        "LOSS": "0.3512",
        "ETA": "1h12m",
        "RESTARTS": "1",
        "AGE": "",
        "STAGE": "Training",
        "ATTEMPT": "2",
        "STEPS": "1000",
        "OUTPUT": "s3://runs/default/mascot/",
    }


def test_the_fullest_status_is_accepted_and_stays_under_8_kb(server, kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    time = "2026-01-02T03:04:05Z"
    conditions = [
        Condition(
            type=kind,
            status="True",
            reason="R" * 40,
            message="m" * 200,
            last_transition_time=time,
            observed_generation=1,
        )
        for kind in ConditionType
    ]
    entries = [LedgerEntry(step=10**7 - i, start=10**5, size_bytes=10**12, committed_at=time) for i in range(20)]
    status = JobStatus(
        observed_generation=1,
        progress=ProgressStatus(step=1, steps=2, loss="0.1", learning_rate="1e-4", eta_seconds=1, updated_at=time),
        checkpoints=CheckpointsStatus(
            location="s3://" + "x" * 200, count=20, newest_step=10**7, entries=tuple(entries)
        ),
        output=OutputStatus(location="x" * 200, adapter="x" * 200, samples=("x" * 100,) * 8, size_bytes=10**12),
        conditions=tuple(conditions),
        start_time=time,
    )
    written = write_status(server, "mascot", status)["status"]
    assert written == status_to_wire(status)
    assert len(json.dumps(written, separators=(",", ":"))) < 8192


def test_the_operator_cannot_change_the_spec_and_a_user_cannot_change_the_status_by_the_other_door(server, kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    kubectl("patch", "ltj", "mascot", "--type=merge", "-p", json.dumps({"status": {"phase": "Succeeded"}}))
    assert kubectl("get", "ltj", "mascot", "-o", "jsonpath={.status.phase}") == "Pending"
    generation = kubectl("get", "ltj", "mascot", "-o", "jsonpath={.metadata.generation}")
    write_status(server, "mascot", JobStatus(phase=Phase.RUNNING))
    assert kubectl("get", "ltj", "mascot", "-o", "jsonpath={.metadata.generation}") == generation


def test_kubectl_apply_refuses_unknown_fields_by_itself(kubectl):
    with pytest.raises(ClusterError, match=r'unknown field "spec.config.save.max_step_save"'):
        kubectl("apply", "-f", "-", stdin=yaml.safe_dump(changed(JOB, "spec.config.save.max_step_save", 3)))


def test_applying_the_same_manifest_again_does_not_count_as_a_change(kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(JOB))
    assert kubectl("get", "ltj", "mascot", "-o", "jsonpath={.metadata.generation}") == "1"


def test_server_side_apply_and_client_side_apply_agree(kubectl):
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(JOB))
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(changed(JOB, "spec.config.train.steps", 5)))
    assert kubectl("get", "ltj", "mascot", "-o", "jsonpath={.spec.config.train.steps}") == "5"


def test_kubectl_explain_explains_a_field(kubectl):
    text = kubectl("explain", "ltj.spec.config.save.max_step_saves")
    assert "How many checkpoints are kept" in text


def test_a_profile_shows_its_image_and_stores(kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(PROFILE))
    header, row = cells(kubectl("get", "ltp"))
    assert dict(zip(header, row, strict=True)) | {"AGE": ""} == {
        "NAME": "default",
        "IMAGE": "trainer:1",
        "STORES": "default",
        "AGE": "",
    }


def test_both_kinds_are_in_the_category_training(kubectl):
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([JOB, PROFILE]))
    assert kubectl("get", "training", "-o", "name").split() == [
        "loratrainingjob.lora-operator.io/mascot",
        "loratrainingprofile.lora-operator.io/default",
    ]


def test_tolerations_are_checked_field_by_field(kubectl):
    good = [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists"}]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(changed(PROFILE, "spec.trainer.tolerations", good)))
    with pytest.raises(ClusterError, match=r'unknown field "spec.trainer.tolerations\[0\].keys"'):
        kubectl(
            "apply", "-f", "-", stdin=yaml.safe_dump(changed(PROFILE, "spec.trainer.tolerations", [{"keys": "gpu"}]))
        )
