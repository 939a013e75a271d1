"""Why an attempt ended. A list of rules, each a named pure function; the first that knows decides.

Evidence in order of trust: the trainer's own word, what Kubernetes says of the pods, what it says of the Job (which
outlives its pods), and last the heartbeat in the run directory (which outlives everything).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from lora_api.exit_codes import NEVER_RETRIED, ExitCode, reason_of
from lora_api.run import ExitWord
from lora_operator.core.views import ChildView, PodView


class Cause(StrEnum):
    """What a restart counts as; PERMANENT is not restarted."""

    PREEMPTION = "preemption"
    FAILURE = "failure"
    OUT_OF_MEMORY = "out_of_memory"
    INFRASTRUCTURE = "infrastructure"
    PERMANENT = "permanent"


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended: what it counts as, one CamelCase word, one sentence."""

    cause: Cause
    reason: str
    message: str


@dataclass(frozen=True)
class Evidence:
    """All that is known about an attempt that ended."""

    child: ChildView | None
    pods: tuple[PodView, ...]
    heartbeat_word: ExitWord | None = None  # from progress.json, if it is this attempt's

    @property
    def words(self) -> list[ExitWord]:
        """The trainer's words: those of pods, else the heartbeat's."""
        spoken = [pod.word for pod in self.pods if pod.word is not None]
        return spoken or ([self.heartbeat_word] if self.heartbeat_word else [])


_DISRUPTED_REASONS = {"Evicted", "Preempting", "NodeShutdown", "Terminated"}
_FOLLOWERS = {0, ExitCode.TRANSIENT, ExitCode.PREEMPTED}  # how ranks end when another one is the cause
_JOB_EXIT_CODE = re.compile(r"failed with exit code (\d+)")
_OOM_ADVICE = "use a smaller batch_size or resolution, gradient_checkpointing, or more memory"


def _a_person_must_act(evidence: Evidence) -> Verdict | None:
    for word in evidence.words:
        if word.code in NEVER_RETRIED:
            return Verdict(Cause.PERMANENT, word.reason, word.message)
    return None


def _out_of_memory(evidence: Evidence) -> Verdict | None:
    for word in evidence.words:
        if word.code == ExitCode.OUT_OF_MEMORY:
            return Verdict(Cause.OUT_OF_MEMORY, word.reason, f"{word.message}; {_OOM_ADVICE}")
    for pod in evidence.pods:
        if pod.oom_killed:
            text = f"Pod {pod.name} was killed because it used more memory than its limit; {_OOM_ADVICE}"
            return Verdict(Cause.OUT_OF_MEMORY, "OutOfHostMemory", text)
    return None


def _disrupted(evidence: Evidence) -> Verdict | None:
    for pod in evidence.pods:
        if pod.disrupted or pod.reason in _DISRUPTED_REASONS:
            return _preempted(evidence, f"Pod {pod.name}: {pod.disrupted or pod.reason}")
    return None


def _node_lost(evidence: Evidence) -> Verdict | None:
    for pod in evidence.pods:
        if pod.phase == "Unknown" or pod.reason == "NodeLost" or (pod.grace_over and not pod.ended):
            return Verdict(Cause.INFRASTRUCTURE, "NodeLost", f"Pod {pod.name} on node {pod.node} can't be reached")
    return None


def _a_process_failed(evidence: Evidence) -> Verdict | None:
    for pod in evidence.pods:
        if pod.terminating or pod.exit_code is None or pod.exit_code in _FOLLOWERS:
            continue
        if pod.word is not None:
            return Verdict(Cause.FAILURE, pod.word.reason, pod.word.message)
        return Verdict(
            Cause.FAILURE, reason_of(pod.exit_code), f"Pod {pod.name} ended with {_exit_words(pod.exit_code)}"
        )
    return None


def _asked_to_stop(evidence: Evidence) -> Verdict | None:
    if any(word.code == ExitCode.PREEMPTED for word in evidence.words):
        return _preempted(evidence, "The trainer was asked to stop")
    for pod in evidence.pods:
        if pod.terminating and pod.ended:
            return _preempted(evidence, f"Pod {pod.name} was deleted")
    return None


def _transient(evidence: Evidence) -> Verdict | None:
    for word in evidence.words:
        return Verdict(Cause.FAILURE, word.reason, word.message)
    return None


def _left_without_result(evidence: Evidence) -> Verdict | None:
    if evidence.child is not None and evidence.child.complete:
        return Verdict(
            Cause.FAILURE, "NoResult", "The trainer ended with exit code 0, but final/manifest.json is missing"
        )
    for pod in evidence.pods:
        if pod.exit_code is not None:
            return Verdict(
                Cause.FAILURE, reason_of(pod.exit_code), f"Pod {pod.name} ended with {_exit_words(pod.exit_code)}"
            )
    return None


def _the_job_remembers(evidence: Evidence) -> Verdict | None:
    message = (evidence.child.failed or evidence.child.failing or "") if evidence.child else ""
    if "DisruptionTarget" in message:
        return _preempted(evidence, message)
    match = _JOB_EXIT_CODE.search(message)
    if not match:
        return None
    code = int(match.group(1))
    if code == ExitCode.PREEMPTED:
        return _preempted(evidence, message)
    cause = Cause.PERMANENT if code in NEVER_RETRIED else Cause.FAILURE
    return Verdict(Cause.OUT_OF_MEMORY if code == ExitCode.OUT_OF_MEMORY else cause, reason_of(code), message)


def _gone_without_a_word(evidence: Evidence) -> Verdict | None:
    detail = f" ({evidence.child.failed})" if evidence.child and evidence.child.failed else ""
    return Verdict(Cause.INFRASTRUCTURE, "PodsGone", f"The pods are gone without a word{detail}")


RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _a_person_must_act,
    _out_of_memory,
    _disrupted,
    _node_lost,
    _a_process_failed,
    _asked_to_stop,
    _transient,
    _left_without_result,
    _the_job_remembers,
    _gone_without_a_word,
)


def classify_end(evidence: Evidence) -> Verdict:
    """The verdict of the first rule that knows; the last one always does."""
    for rule in RULES:
        verdict = rule(evidence)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule always knows")


def has_ended(child: ChildView, pods: tuple[PodView, ...]) -> bool:
    """Whether an attempt is over: its Job says so, or all that still lives can't be reached any more."""
    if child.finished:
        return all(pod.ended or pod.grace_over for pod in pods)
    living = [pod for pod in pods if not pod.ended]
    return child.failing is not None and bool(living) and all(pod.grace_over for pod in living)


def _preempted(evidence: Evidence, why: str) -> Verdict:
    saved = max((word.step for word in evidence.words if word.code == ExitCode.PREEMPTED), default=None)
    text = f"{why}; saved at step {saved}" if saved is not None else f"{why}; it could not save any more"
    return Verdict(Cause.PREEMPTION, "Preempted", text)


def _exit_words(code: int) -> str:
    if code > 128:
        return f"exit code {code} (signal {code - 128})"
    return f"exit code {code}"
