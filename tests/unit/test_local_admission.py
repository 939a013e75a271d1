"""Starting the same job again: the same identity, what may change, and what a killed or failed run left."""

from __future__ import annotations

import copy

import pytest

from lora_api.problems import InvalidDocument
from lora_api.run import ExitWord
from lora_operator.adapters.local_jobs import build_pod, mark_ended, mark_running
from lora_operator.core.read import child_view, pod_view
from lora_operator.core.times import parse_time
from lora_operator.local.admission import admit, begin_again, end_leftovers, immutable_changes, run_uid
from tests.local_runs import job_manifest

NOW = "2026-01-01T00:00:00Z"


def condition(kind, status="True"):
    return {"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": NOW}


def begun(manifest=None):
    manifest = copy.deepcopy(manifest or job_manifest())
    manifest["metadata"]["namespace"] = "default"
    return admit(manifest, None, "uid-1", NOW)


def test_the_uid_depends_on_store_path_and_name_and_on_nothing_else():
    uid = run_uid("/runs", "a/b", "default", "b")
    assert uid == run_uid("/runs", "a/b", "default", "b")
    others = [("/other", "a/b", "default", "b"), ("/runs", "a/c", "default", "b"), ("/runs", "a/b", "default", "c")]
    assert uid not in {run_uid(*other) for other in others}


def test_a_new_job_gets_generation_1_and_no_status():
    job = begun().job
    assert (job["metadata"]["uid"], job["metadata"]["generation"]) == ("uid-1", 1)
    assert "status" not in job


def test_the_same_manifest_keeps_identity_status_and_generation():
    saved = begun()
    saved.job["status"] = {"attempt": 3}
    again = admit(job_manifest(), saved, "another", NOW)
    assert again.job["metadata"]["uid"] == "uid-1"
    assert again.job["metadata"]["generation"] == 1
    assert again.job["status"] == {"attempt": 3}
    assert int(again.job["metadata"]["resourceVersion"]) > int(saved.job["metadata"]["resourceVersion"])


@pytest.mark.parametrize(
    "change",
    [{"train__steps": 99}, {"train__lr": 0.5}, {"save__save_every": 1}, {"sample__prompts": ["x"]}, {"device": "cuda"}],
    ids=str,
)
def test_what_may_change_raises_the_generation(change):
    again = admit(job_manifest(**change), begun(), "uid", NOW)
    assert again.job["metadata"]["generation"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train__batch_size": 4},
            "spec.config.train.batch_size: is 4, but the run was begun with 1, and this defines the run",
        ),
        (
            {"network__linear": 8},
            "spec.config.network.linear: is 8, but the run was begun with 16, and this defines the run",
        ),
        (
            {"datasets": [{"folder_path": "other"}]},
            'spec.config.datasets[0].folder_path: is "other", but the run was begun with "data", and this defines the run',
        ),
    ],
)
def test_what_defines_the_run_is_named_when_it_changes(change, message):
    with pytest.raises(InvalidDocument) as caught:
        admit(job_manifest(**change), begun(), "uid", NOW)
    assert [str(problem) for problem in caught.value.problems] == [message]


def test_a_default_that_is_written_out_is_no_change():
    assert immutable_changes(job_manifest()["spec"], job_manifest(train__batch_size=1)["spec"]) == []


def test_another_output_path_is_another_run():
    changed = job_manifest()
    changed["spec"]["output"] = {"path": "elsewhere"}
    (problem,) = immutable_changes(job_manifest()["spec"], changed["spec"])
    assert problem.path == "spec.output.path"


def test_after_a_failure_the_next_attempt_is_a_fresh_try():
    saved = begun()
    saved.job["status"] = {
        "attempt": 4,
        "restarts": {"failure": 3},
        "conditions": [condition("Failed")],
        "checkpoints": {"count": 1, "newestStep": 20},
    }
    assert begin_again(saved)
    status = saved.job["status"]
    assert (status["attempt"], status["childName"]) == (5, "stub-5")
    assert status["checkpoints"]["newestStep"] == 20
    assert "conditions" not in status
    assert "restarts" not in status


def test_a_job_that_has_not_failed_just_goes_on():
    saved = begun()
    saved.job["status"] = {"attempt": 2, "conditions": [condition("Failed", "False")]}
    assert not begin_again(saved)
    assert saved.job["status"]["attempt"] == 2


def test_pods_of_a_killed_run_ended_as_on_a_node_that_was_shut_down():
    saved = begun()
    child = {
        "metadata": {"name": "stub-1", "namespace": "default", "uid": "c"},
        "spec": {"template": {"spec": {"containers": [{"name": "trainer"}]}}},
        "status": {},
    }
    saved_word = ExitWord(code=85, reason="Preempted", message="saved", step=7).model_dump_json(by_alias=True)
    pods = [build_pod(child, index, f"stub-1-{index}", f"u{index}", NOW) for index in range(3)]
    for pod in pods:
        mark_running(pod, NOW)
    mark_ended(pods[2], 0, "", NOW)
    saved.children.append(child)
    saved.pods.extend(pods)
    end_leftovers(saved, {"stub-1-0": saved_word}, NOW)
    first, second, third = (pod_view(pod, parse_time(NOW)) for pod in saved.pods)
    assert (first.exit_code, first.word.step, first.disrupted) == (85, 7, "lora-operator was stopped")
    assert (second.exit_code, second.phase) == (137, "Failed")
    assert (third.exit_code, third.disrupted) == (0, None), "it had ended before"
    assert child_view(child, "x").finished
