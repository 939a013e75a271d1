"""Manifests as the API server has them, as views."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lora_api.job import ConditionType, JobStatus, Phase, status_to_wire
from lora_operator.core.conditions import holds
from lora_operator.core.read import attempt_of, child_view, exit_word, pod_view, read_status
from lora_operator.core.state import Kind, State, facts_of
from lora_operator.core.times import format_time
from tests.unit.builders import NOW, ago, word


def a_pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    labels = {"lora-operator.io/attempt": "3"}
    annotations = {"batch.kubernetes.io/job-completion-index": "2"}
    return {
        "metadata": {"name": "mascot-3-2-x", "labels": labels, "annotations": annotations, **metadata},
        "spec": {"nodeName": "node-7"},
        "status": status,
    }


def container(state: dict[str, Any], name: str = "trainer") -> dict[str, Any]:
    return {"name": name, "state": state}


def test_a_running_pod() -> None:
    sidecar = container({"terminated": {"exitCode": 3}}, "sidecar")
    status = {
        "phase": "Running",
        "containerStatuses": [sidecar, container({"running": {"startedAt": ago(60)}})],
    }
    view = pod_view(a_pod(status), NOW)
    assert (view.name, view.index, view.phase, view.node) == ("mascot-3-2-x", 2, "Running", "node-7")
    assert view.started_at == NOW - timedelta(seconds=60)
    assert (view.exit_code, view.word, view.terminating, view.ended) == (None, None, False, False)
    assert attempt_of(a_pod(status)) == 3


def test_an_ended_pod_with_the_last_word_of_its_trainer() -> None:
    message = f"some log line\n{word(85, step=9).model_dump_json()}\n"
    status = {
        "phase": "Failed",
        "containerStatuses": [container({"terminated": {"exitCode": 85, "reason": "Error", "message": message}})],
    }
    view = pod_view(a_pod(status), NOW)
    assert (view.exit_code, view.oom_killed, view.ended) == (85, False, True)
    assert view.word is not None
    assert (view.word.code, view.word.step) == (85, 9)


def test_a_pod_killed_for_memory_and_an_evicted_one() -> None:
    killed = {
        "phase": "Failed",
        "containerStatuses": [container({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})],
    }
    assert pod_view(a_pod(killed), NOW).oom_killed
    evicted = pod_view(a_pod({"phase": "Failed", "reason": "Evicted", "message": "too much disk"}), NOW)
    assert (evicted.reason, evicted.message, evicted.exit_code) == ("Evicted", "too much disk", None)


def test_a_pod_that_waits_says_why_when_that_is_news() -> None:
    pulls = container({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}})
    view = pod_view(a_pod({"phase": "Pending", "containerStatuses": [pulls]}), NOW)
    assert view.waiting == "ImagePullBackOff: Back-off pulling image"
    starts = container({"waiting": {"reason": "ContainerCreating"}})
    assert pod_view(a_pod({"phase": "Pending", "containerStatuses": [starts]}), NOW).waiting is None


def test_a_pod_that_finds_no_node_until_it_does() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    assert pod_view(a_pod({"phase": "Pending", "conditions": [condition]}), NOW).unschedulable == "0/3 nodes"
    found = {"type": "PodScheduled", "status": "True"}
    assert pod_view(a_pod({"phase": "Pending", "conditions": [found]}), NOW).unschedulable is None


def test_a_disruption_counts_only_while_it_is_true() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
    assert pod_view(a_pod({"phase": "Running", "conditions": [condition]}), NOW).disrupted == "drained"
    over = {**condition, "status": "False"}
    assert pod_view(a_pod({"phase": "Running", "conditions": [over]}), NOW).disrupted is None


def test_the_grace_of_a_deleted_pod_is_over_half_a_minute_after_its_deadline() -> None:
    for seconds, over in ((-60, False), (10, False), (31, True)):
        view = pod_view(a_pod({"phase": "Running"}, deletionTimestamp=ago(seconds)), NOW)
        assert (view.terminating, view.grace_over) == (True, over)


def test_a_pod_that_was_just_made_has_no_status() -> None:
    view = pod_view({"metadata": {"name": "p"}, "spec": {}}, NOW)
    assert (view.phase, view.node, view.index) == ("Pending", None, 0)


def test_a_job_and_whose_it_is() -> None:
    owners = [{"kind": "LoRATrainingJob", "uid": "u1"}]
    manifest = {
        "metadata": {
            "name": "mascot-3",
            "uid": "c",
            "labels": {"lora-operator.io/attempt": "3"},
            "ownerReferences": owners,
            "creationTimestamp": ago(90),
        },
        "spec": {"suspend": True},
        "status": {
            "startTime": ago(30),
            "conditions": [
                {"type": "Suspended", "status": "True"},
                {"type": "FailureTarget", "status": "True", "message": "why"},
                {"type": "Failed", "status": "False", "message": "no"},
            ],
        },
    }
    view = child_view(manifest, "u1")
    assert (view.ours, view.of_a_job, view.attempt, view.suspended) == (True, True, 3, True)
    assert (view.failing, view.failed, view.complete, view.finished) == ("why", None, False, False)
    assert view.started_at == NOW - timedelta(seconds=30)
    theirs = child_view(manifest, "u2")
    assert (theirs.ours, theirs.of_a_job) == (False, True)


def test_what_is_not_a_word_is_none() -> None:
    assert exit_word(None) is exit_word("") is exit_word("Traceback") is exit_word('{"code": "x"}') is None
    assert exit_word('{"code": 1, "reason": "A", "message": "m"}\ntrailing') is not None


def test_a_status_survives_its_way_over_the_wire() -> None:
    from lora_operator.core.conditions import merge_conditions

    status = JobStatus(
        attempt=3,
        conditions=merge_conditions((), facts_of(State(Kind.FAILED, "Error", "why")), 1, NOW),
        completion_time=format_time(NOW),
    )
    assert read_status({"status": status_to_wire(status)}) == status
    assert read_status({}) == read_status({"status": None}) == JobStatus()


def test_what_a_newer_version_added_to_a_status_does_not_undo_its_end() -> None:
    from lora_operator.core.conditions import merge_conditions

    conditions = merge_conditions((), facts_of(State(Kind.FAILED, "Error", "why")), 1, NOW)
    wire = status_to_wire(JobStatus(attempt=3, phase=Phase.FAILED, conditions=conditions))
    wire["carbonFootprint"] = {"grams": 3}
    wire["restarts"]["meteor"] = 1
    wire["conditions"][0]["severity"] = "Info"
    wire["stage"] = "Dreaming"
    wire["progress"] = {"step": "far"}
    status = read_status({"status": wire})
    assert (status.attempt, status.phase, status.stage) == (3, Phase.FAILED, None)
    assert holds(status, ConditionType.FAILED)
