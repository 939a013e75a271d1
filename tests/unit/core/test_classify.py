"""Why an attempt ended: one case for each row of evidence."""

from __future__ import annotations

import pytest

from lora_operator.core.classify import RULES, Cause, Evidence, classify_end, has_ended
from tests.unit.builders import ChildBuilder, PodBuilder, word

EXIT_85 = "Container trainer for pod team-a/mascot-1-0-x failed with exit code 85 matching FailJob rule at index 1"
EXIT_64 = "Container trainer for pod team-a/mascot-1-0-x failed with exit code 64 matching FailJob rule at index 1"
DISRUPTED = "Pod team-a/mascot-1-0-x has condition DisruptionTarget matching FailJob rule at index 0"


def evidence(*pods: PodBuilder, child: ChildBuilder | None = None, heartbeat: object = None) -> Evidence:
    views = tuple(pod.build() for pod in pods)
    return Evidence((child or ChildBuilder().failed()).build(), views, heartbeat)  # type: ignore[arg-type]


SINGLE = {
    "a preempted pod with its word": (
        evidence(PodBuilder().ended(85, word(85, step=900)).disrupted().deleted()),
        (Cause.PREEMPTION, "Preempted"),
        "saved at step 900",
    ),
    "a preempted pod that was killed before it could save": (
        evidence(PodBuilder().ended(137).disrupted()),
        (Cause.PREEMPTION, "Preempted"),
        "it could not save any more",
    ),
    "a deleted pod": (
        evidence(PodBuilder().ended(85, word(85, step=3)).deleted()),
        (Cause.PREEMPTION, "Preempted"),
        "was deleted; saved at step 3",
    ),
    "a pod deleted by force": (
        evidence(PodBuilder().ended(137).deleted()),
        (Cause.PREEMPTION, "Preempted"),
        "was deleted; it could not save",
    ),
    "a signal to the process itself": (
        evidence(PodBuilder().ended(85, word(85, step=7))),
        (Cause.PREEMPTION, "Preempted"),
        "asked to stop; saved at step 7",
    ),
    "a pod killed by hand": (
        evidence(PodBuilder().ended(137)),
        (Cause.FAILURE, "Error"),
        "exit code 137 (signal 9)",
    ),
    "too much host memory": (
        evidence(PodBuilder().oom_killed()),
        (Cause.OUT_OF_MEMORY, "OutOfHostMemory"),
        "more memory than its limit",
    ),
    "too much device memory": (
        evidence(PodBuilder().ended(86, word(86, "CUDA out of memory", reason="OutOfDeviceMemory"))),
        (Cause.OUT_OF_MEMORY, "OutOfDeviceMemory"),
        "CUDA out of memory",
    ),
    "bad data": (
        evidence(PodBuilder().ended(65, word(65, "pictures/3.png is not a picture", reason="InvalidData"))),
        (Cause.PERMANENT, "InvalidData"),
        "pictures/3.png is not a picture",
    ),
    "bad configuration without a word": (
        evidence(PodBuilder().ended(64)),
        (Cause.PERMANENT, "InvalidConfiguration"),
        "exit code 64",
    ),
    "no usable checkpoint": (
        evidence(PodBuilder().ended(66, word(66, reason="NoUsableCheckpoint"))),
        (Cause.PERMANENT, "NoUsableCheckpoint"),
        "said",
    ),
    "refused credentials": (
        evidence(PodBuilder().ended(77, word(77, reason="CredentialsRefused"))),
        (Cause.PERMANENT, "CredentialsRefused"),
        "said",
    ),
    "a store that was away": (
        evidence(PodBuilder().ended(75, word(75, reason="TransientError"))),
        (Cause.FAILURE, "TransientError"),
        "said",
    ),
    "a loss that is not finite": (
        evidence(PodBuilder().ended(87, word(87, reason="LossNotFinite"))),
        (Cause.FAILURE, "LossNotFinite"),
        "said",
    ),
    "an exit with 0 that left no result": (
        evidence(PodBuilder().ended(0, word(0, reason="Completed")), child=ChildBuilder().complete()),
        (Cause.FAILURE, "NoResult"),
        "final/manifest.json is missing",
    ),
    "a complete Job whose pods are gone": (
        evidence(child=ChildBuilder().complete()),
        (Cause.FAILURE, "NoResult"),
        "final/manifest.json is missing",
    ),
    "an eviction by the node": (
        evidence(PodBuilder().evicted("The node was low on memory").disrupted("node pressure")),
        (Cause.PREEMPTION, "Preempted"),
        "node pressure",
    ),
    "an eviction for its own use": (
        evidence(PodBuilder().evicted('Usage of EmptyDir volume "shm" exceeds the limit "1Gi".')),
        (Cause.FAILURE, "Evicted"),
        'volume "shm" exceeds the limit',
    ),
    "a node that can't be reached": (
        evidence(PodBuilder().disrupted("taint").deleted(grace_over=True), child=ChildBuilder()),
        (Cause.INFRASTRUCTURE, "NodeLost"),
        "on node node-0 can't be reached",
    ),
    "a Job that remembers a disruption": (
        evidence(child=ChildBuilder().failed(DISRUPTED), heartbeat=word(85, step=40)),
        (Cause.PREEMPTION, "Preempted"),
        "A pod was disrupted; saved at step 40",
    ),
    "a Job that remembers a saved stop": (
        evidence(child=ChildBuilder().failed(EXIT_85), heartbeat=word(85, step=40)),
        (Cause.PREEMPTION, "Preempted"),
        "asked to stop; saved at step 40",
    ),
    "a Job that remembers an exit code, and a heartbeat that knows why": (
        evidence(
            child=ChildBuilder().failed(EXIT_64), heartbeat=word(64, "lr: too big", reason="InvalidConfiguration")
        ),
        (Cause.PERMANENT, "InvalidConfiguration"),
        "lr: too big",
    ),
    "a Job that remembers an exit code, and a heartbeat of something else": (
        evidence(child=ChildBuilder().failed(EXIT_64), heartbeat=word(85)),
        (Cause.PERMANENT, "InvalidConfiguration"),
        "exit code 64",
    ),
    "a heartbeat alone": (
        Evidence(None, (), word(85, step=12)),
        (Cause.PREEMPTION, "Preempted"),
        "saved at step 12",
    ),
    "a heartbeat alone that failed": (
        Evidence(None, (), word(75, "rendezvous timed out", reason="TransientError")),
        (Cause.FAILURE, "TransientError"),
        "rendezvous timed out",
    ),
    "nothing at all": (
        Evidence(None, (), None),
        (Cause.INFRASTRUCTURE, "PodsGone"),
        "gone without a word",
    ),
    "a Job that only says it failed": (
        evidence(),
        (Cause.INFRASTRUCTURE, "PodsGone"),
        "reached the specified backoff limit",
    ),
}


@pytest.mark.parametrize("what", SINGLE)
def test_each_kind_of_end_has_its_cause_and_its_sentence(what: str) -> None:
    seen, expected, sentence = SINGLE[what]
    verdict = classify_end(seen)
    assert (verdict.cause, verdict.reason) == expected
    assert sentence in verdict.message


def test_of_several_pods_the_one_that_failed_by_itself_decides() -> None:
    failed = PodBuilder(0).ended(1)
    for follower in (
        PodBuilder(1).ended(75, word(75)),
        PodBuilder(1).ended(85, word(85)).deleted(),
        PodBuilder(1).ended(137).deleted(),
        PodBuilder(1).ended(143).deleted(),
        PodBuilder(1).ended(0),
    ):
        for pods in ((failed, follower), (follower, failed)):
            verdict = classify_end(evidence(*pods))
            assert (verdict.cause, verdict.message) == (
                Cause.FAILURE,
                "Pod mascot-1-0-abcde ended with exit code 1",
            )


def test_a_transient_error_stays_one_when_the_other_pods_are_stopped_for_it() -> None:
    verdict = classify_end(
        evidence(PodBuilder(0).ended(75, word(75, "store away")), PodBuilder(1).ended(85, word(85)).deleted())
    )
    assert (verdict.cause, verdict.message) == (Cause.FAILURE, "store away")


def test_a_pod_that_was_asked_to_stop_explains_the_transient_error_of_the_others() -> None:
    verdict = classify_end(evidence(PodBuilder(0).ended(75, word(75)), PodBuilder(1).ended(85, word(85, step=5))))
    assert (verdict.cause, verdict.message) == (Cause.PREEMPTION, "The trainer was asked to stop; saved at step 5")


def test_a_disruption_of_one_pod_explains_whatever_the_others_did() -> None:
    for other in (PodBuilder(1).ended(1), PodBuilder(1).ended(75, word(75)), PodBuilder(1).ended(137)):
        assert classify_end(evidence(PodBuilder(0).ended(85).disrupted(), other)).cause is Cause.PREEMPTION
        gone = evidence(other, child=ChildBuilder().failed(DISRUPTED))
        assert classify_end(gone).cause is Cause.PREEMPTION


def test_what_a_person_must_put_right_beats_everything_else() -> None:
    verdict = classify_end(evidence(PodBuilder(0).ended(85).disrupted(), PodBuilder(1).ended(65, word(65))))
    assert verdict.cause is Cause.PERMANENT


def test_a_word_of_success_does_not_hide_a_bad_end() -> None:
    verdict = classify_end(evidence(PodBuilder().ended(139, word(0))))
    assert (verdict.cause, verdict.message) == (
        Cause.FAILURE,
        "Pod mascot-1-0-abcde ended with exit code 139 (signal 11)",
    )


def test_the_last_rule_always_knows() -> None:
    assert RULES[-1](Evidence(None, ())) is not None


def test_an_attempt_has_ended_when_its_job_has_and_no_pod_lives() -> None:
    done, running = PodBuilder().ended(0).build(), PodBuilder().build()
    assert has_ended(ChildBuilder().failed().build(), ())
    assert has_ended(ChildBuilder().complete().build(), (done,))
    assert not has_ended(ChildBuilder().failed().build(), (running,))
    assert not has_ended(ChildBuilder().build(), (done,)), "the Job has not said so yet"
    assert not has_ended(ChildBuilder().build(), ())


def test_an_attempt_has_ended_when_all_that_lives_is_out_of_reach() -> None:
    lost = PodBuilder().deleted(grace_over=True).build()
    assert has_ended(ChildBuilder().build(), (lost,))
    assert has_ended(ChildBuilder().failing("x").build(), (lost, PodBuilder(1).ended(75).build()))
    assert not has_ended(ChildBuilder().build(), (lost, PodBuilder(1).build()))
    assert not has_ended(ChildBuilder().build(), (PodBuilder().deleted().build(),))
