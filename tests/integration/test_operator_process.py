"""The operator's process against a real API server; the tests play users, kubelets and the Job controller."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lora_api.run import FinalManifest, RunFile
from tests.cluster.apiserver import ApiServer
from tests.cluster.s3 import SeaweedS3
from tests.contract.cluster_objects import a_child, a_job
from tests.integration.operator_process import BUCKET, Hands, Operator, child_of, eventually


@pytest.fixture(scope="module")
def operator(chart_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One process for all tests of this file; its log must be clean in the end."""
    with Operator(chart_server, tmp_path_factory.mktemp("operator")) as operator:
        yield operator
        assert operator.health() == 200
        text = operator.text()
        assert "forbidden" not in text, "the chart grants too little"
        assert "Traceback" not in text


def put(s3: SeaweedS3, team: Hands, key: str, document: Any) -> None:
    """Writes a document into the run directory of the job `mascot`, as its trainer would."""
    data = document.model_dump_json(by_alias=True).encode()
    s3.client.put_object(BUCKET, f"{team.namespace}/mascot/{key}", io.BytesIO(data), len(data))


def keys_in(s3: SeaweedS3, team: Hands) -> list[str]:
    return [item.object_name for item in s3.client.list_objects(BUCKET, f"{team.namespace}/mascot/", recursive=True)]


def finish(s3: SeaweedS3, team: Hands) -> None:
    """The trainer has written its result and its pod has ended well."""
    uid = team.job("mascot")["metadata"]["uid"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = {"uid": uid, "config_hash": "0" * 16}
    run = RunFile(job_name="mascot", namespace=team.namespace, created_at=now, **facts)
    final = FinalManifest(step=10, start=1, completed_at=now, adapter="mascot.safetensors", **facts)
    put(s3, team, "run.json", run)
    put(s3, team, "final/manifest.json", final)
    team.end_child("mascot-1", "Complete", "CompletionsReached")


def test_a_job_gets_its_children_its_status_and_its_events(operator: Operator, team: Hands) -> None:
    job = team.apply(a_job(namespace=team.namespace))
    child = child_of(team)
    for made in (child, team.core("services", "mascot-1"), team.core("configmaps", "mascot-1")):
        assert made is not None
        owner = made["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("LoRATrainingJob", job["metadata"]["uid"], True)
    eventually("attempt 1 in the status", lambda: team.status("mascot").get("childName") == "mascot-1")
    assert team.condition("mascot", "Accepted")["status"] == "True"
    assert team.status("mascot")["observedGeneration"] == 1
    eventually("the event", lambda: ("Created", "Created attempt 1 as Job mascot-1") in team.events())
    untouched = team.job("mascot")["metadata"]
    assert "annotations" not in untouched
    assert "finalizers" not in untouched


def test_the_pods_of_a_job_move_its_status_within_seconds(operator: Operator, team: Hands) -> None:
    team.apply(a_job(namespace=team.namespace))
    pod = team.make_pod(child_of(team))
    team.run_pod(pod)
    eventually("Running", lambda: team.condition("mascot", "Running").get("status") == "True", 3)


def test_a_preempted_attempt_is_followed_by_the_next_one(operator: Operator, team: Hands) -> None:
    before = operator.metric("lora_operator_restarts_total", cause="preemption")
    team.apply(a_job(namespace=team.namespace))
    pod = team.make_pod(child_of(team))
    team.run_pod(pod)
    eventually("Running", lambda: team.condition("mascot", "Running").get("status") == "True")
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
    team.set_pod(pod, conditions=[disrupted])
    team.end_pod(pod, 85, '{"code": 85, "reason": "Preempted", "message": "saved at step 5", "step": 5}')
    team.end_child("mascot-1", "Failed", "PodFailurePolicy", "drained")
    second = child_of(team, "mascot-2")
    assert second["metadata"]["labels"]["lora-operator.io/attempt"] == "2"
    restarts = eventually("a restart", lambda: team.status("mascot").get("restartsTotal") and team.status("mascot"))
    assert restarts["restarts"]["preemption"] == 1
    eventually("the metric", lambda: operator.metric("lora_operator_restarts_total", cause="preemption") == before + 1)


def test_a_job_that_has_finished_costs_no_request_any_more(operator: Operator, team: Hands, s3: SeaweedS3) -> None:
    finished = operator.metric("lora_operator_jobs_finished_total", result="Succeeded")
    team.apply(a_job(namespace=team.namespace))
    pod = team.make_pod(child_of(team))
    finish(s3, team)
    eventually("Succeeded", lambda: team.condition("mascot", "Succeeded").get("status") == "True")
    eventually("a quiet queue", lambda: operator.metric("lora_operator_queue_depth") == 0)
    time.sleep(1)
    before = operator.metric("lora_operator_api_requests_total")
    team.remove_pod(pod)
    team.patch("mascot", {"metadata": {"labels": {"touched": "yes"}}})
    time.sleep(2)
    assert operator.metric("lora_operator_api_requests_total") == before
    assert team.condition("mascot", "Succeeded")["status"] == "True"
    assert operator.metric("lora_operator_job_step", namespace=team.namespace) == 0, "a finished job has no series"
    assert operator.metric("lora_operator_jobs_finished_total", result="Succeeded") == finished + 1


def test_a_foreign_job_of_the_childs_name_is_reported_and_left_alone(operator: Operator, team: Hands) -> None:
    foreign = a_child(namespace=team.namespace)
    foreign["metadata"]["labels"] = {"app": "theirs"}
    made = team.ask("POST", f"/apis/batch/v1/namespaces/{team.namespace}/jobs", foreign)
    team.apply(a_job(namespace=team.namespace))
    eventually("NameTaken", lambda: team.condition("mascot", "Accepted").get("reason") == "NameTaken")
    time.sleep(1)
    there = team.child("mascot-1")
    assert there is not None
    assert there["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_a_job_waits_for_its_profile_and_starts_when_it_comes(operator: Operator, team: Hands) -> None:
    team.apply(a_job(namespace=team.namespace, profile=team.namespace))
    eventually("not accepted", lambda: team.condition("mascot", "Accepted").get("status") == "False")
    assert team.namespace in team.condition("mascot", "Accepted")["message"]
    profiles = "/apis/lora-operator.io/v1alpha1/loratrainingprofiles"
    profile = team.ask("GET", f"{profiles}/default")
    copy = {**profile, "metadata": {"name": team.namespace}}
    team.ask("POST", profiles, copy)
    eventually("the child, as the profile's watch says", lambda: team.child("mascot-1"), 5)


def test_a_missing_secret_is_named_in_the_status(operator: Operator, team: Hands) -> None:
    team.ask("DELETE", f"/api/v1/namespaces/{team.namespace}/secrets/store")
    team.apply(a_job(namespace=team.namespace))
    refused = eventually("not accepted", lambda: team.condition("mascot", "Accepted").get("status") == "False")
    assert refused
    assert "store" in team.condition("mascot", "Accepted")["message"]


def test_a_suspended_job_gives_its_pods_back_and_goes_on_later(operator: Operator, team: Hands) -> None:
    team.apply(a_job(namespace=team.namespace))
    child_of(team)
    team.patch("mascot", {"spec": {"runPolicy": {"suspend": True}}})
    eventually("no child", lambda: team.child("mascot-1") is None)
    for plural in ("services", "configmaps"):
        eventually(f"no {plural}", lambda plural=plural: team.core(plural, "mascot-1") is None)
    eventually("Suspended", lambda: team.condition("mascot", "Suspended").get("status") == "True")
    team.patch("mascot", {"spec": {"runPolicy": {"suspend": False}}})
    eventually("a child again", team.children)


def test_deleting_a_job_with_the_policy_delete_takes_its_run_directory(
    operator: Operator, team: Hands, s3: SeaweedS3
) -> None:
    team.apply(a_job(namespace=team.namespace, output={"deletionPolicy": "Delete"}))
    child_of(team)
    eventually("the finalizer", lambda: team.job("mascot")["metadata"].get("finalizers"))
    uid = team.job("mascot")["metadata"]["uid"]
    now = "2026-01-01T00:00:00Z"
    put(
        s3,
        team,
        "run.json",
        RunFile(uid=uid, job_name="mascot", namespace=team.namespace, config_hash="0", created_at=now),
    )
    assert keys_in(s3, team)
    team.delete("mascot")
    eventually("gone", lambda: not team.job("mascot"), 30)
    assert keys_in(s3, team) == []
    assert team.children() == []


def test_two_hundred_jobs_at_once_are_all_started(operator: Operator, team: Hands) -> None:
    for index in range(200):
        team.apply(a_job(f"job-{index}", namespace=team.namespace))
    eventually("200 children", lambda: len(team.children()) == 200, 90)
    assert operator.health() == 200
