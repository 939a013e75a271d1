"""The Job controller's rules of the local engine."""

from __future__ import annotations

import pytest

from lora_operator.adapters.local_jobs import (
    build_pod,
    count_status,
    decide,
    mark_disrupted,
    mark_ended,
    mark_running,
    set_condition,
)

NOW = "2026-01-01T00:00:00Z"
IGNORE_75 = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}}
FAIL_65 = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [65]}}
FAIL_DISRUPTED = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}


def a_job(completions=1, backoff=0, rules=()):
    spec = {
        "completions": completions,
        "backoffLimit": backoff,
        "podFailurePolicy": {"rules": list(rules)},
        "template": {"spec": {"containers": [{"name": "trainer"}]}},
    }
    return {"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": spec, "status": {}}


def a_pod(job, index=0, code=None, *, disrupted=False):
    pod = build_pod(job, index, f"j-{index}", f"u{index}", NOW)
    mark_running(pod, NOW)
    if disrupted:
        mark_disrupted(pod, "PreemptionByScheduler", "needed", NOW)
    if code is not None:
        mark_ended(pod, code, "", NOW)
    return pod


def test_every_index_gets_a_pod():
    assert decide(a_job(completions=3), []).create_indexes == (0, 1, 2)


def test_a_running_index_gets_no_second_one():
    job = a_job(completions=2)
    assert decide(job, [a_pod(job, 1)]).create_indexes == (0,)


def test_the_job_is_complete_when_every_index_is():
    job = a_job(completions=2)
    assert not decide(job, [a_pod(job, 0, 0), a_pod(job, 1)]).complete
    assert decide(job, [a_pod(job, 0, 0), a_pod(job, 1, 0)]).complete


def test_a_failure_beyond_the_backoff_limit_fails_the_job_and_stops_the_others():
    job = a_job(completions=2)
    decision = decide(job, [a_pod(job, 0, 1), a_pod(job, 1)])
    assert decision.failure == ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
    assert decision.stop_pods == ("j-1",)


def test_a_failure_within_the_backoff_limit_is_replaced():
    job = a_job(backoff=1)
    decision = decide(job, [a_pod(job, 0, 1)])
    assert (decision.failure, decision.create_indexes) == (None, (0,))


def test_an_ignored_failure_does_not_count():
    job = a_job(rules=[IGNORE_75])
    assert decide(job, [a_pod(job, 0, 75), a_pod(job, 0, 75)]).create_indexes == (0,)


def test_a_fail_rule_is_named_with_its_exit_code():
    job = a_job(backoff=5, rules=[IGNORE_75, FAIL_65])
    assert decide(job, [a_pod(job, 0, 65)]).failure == (
        "PodFailurePolicy",
        "Container trainer for pod n/j-0 failed with exit code 65 matching FailJob rule at index 1",
    )


def test_a_disruption_is_told_from_a_failure_only_when_the_pod_has_failed():
    job = a_job(backoff=5, rules=[FAIL_DISRUPTED])
    assert decide(job, [a_pod(job, 0, disrupted=True)]).failure is None, "it is still saving"
    assert decide(job, [a_pod(job, 0, 0, disrupted=True)]).complete, "it finished in time"
    reason, message = decide(job, [a_pod(job, 0, 85, disrupted=True)]).failure
    assert (reason, "has condition DisruptionTarget" in message) == ("PodFailurePolicy", True)


@pytest.mark.parametrize("condition", ["Failed", "Complete"])
def test_a_finished_job_starts_nothing_more(condition):
    job = a_job(completions=2)
    set_condition(job, condition, "R", "m", NOW)
    assert decide(job, []).create_indexes == ()


def test_a_condition_once_true_keeps_its_first_words():
    job = a_job()
    set_condition(job, "Failed", "First", "m", NOW)
    set_condition(job, "Failed", "Second", "m", NOW)
    assert [c["reason"] for c in job["status"]["conditions"]] == ["First"]


def test_pods_are_counted_by_phase():
    job = a_job(completions=4)
    count_status(job, [a_pod(job, 0), a_pod(job, 1, 0), a_pod(job, 2, 1), build_pod(job, 3, "j-3", "u", NOW)])
    assert job["status"] == {"active": 2, "ready": 1, "succeeded": 1, "failed": 1}


def test_a_signal_is_told_from_an_exit_code():
    job = a_job()
    terminated = a_pod(job, 0, 137)["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["exitCode"], terminated["signal"]) == (137, 9)
