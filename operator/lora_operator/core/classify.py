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
    shrink_helps: bool = False  # out of memory: whether a smaller micro-batch needs less of what ran out


@dataclass(frozen=True)
class Ending:
    """How one process ended."""

    code: int
    reason: str
    message: str
    pod: PodView | None = None  # None: known only from the Job or the heartbeat
    shrink_helps: bool = True  # out of memory: without the trainer's word, training steps are the likeliest to need it


@dataclass(frozen=True)
class Evidence:
    """All that is known about an attempt that ended."""

    child: ChildView | None
    pods: tuple[PodView, ...]
    heartbeat_word: ExitWord | None = None  # from progress.json, if it is this attempt's

    @property
    def endings(self) -> list[Ending]:
        """How the pods ended, in their own words where they left some; without pods, what Job or heartbeat remember."""
        told = [_ending_of(pod) for pod in self.pods if pod.word is not None or pod.exit_code is not None]
        return told or [ending for ending in (self._remembered(),) if ending is not None]

    @property
    def saved_step(self) -> int | None:
        """The step that was saved when the trainer was asked to stop; None when it left no word of that."""
        words = [pod.word for pod in self.pods if pod.word] or ([self.heartbeat_word] if self.heartbeat_word else [])
        return max((word.step for word in words if word.code == ExitCode.PREEMPTED), default=None)

    def _remembered(self) -> Ending | None:
        """The Job's exit code, said in the words of the heartbeat where it knows the same code; or the heartbeat alone."""
        word = self.heartbeat_word
        match = _JOB_EXIT_CODE.search(_job_message(self.child))
        if match is None or (word is not None and word.code == int(match.group(1))):
            return _ending_in_words(word) if word else None
        return Ending(int(match.group(1)), reason_of(int(match.group(1))), _job_message(self.child))


OUT_OF_HOST_MEMORY = "OutOfHostMemory"
_DISRUPTED_REASONS = {"Preempting", "NodeShutdown", "Terminated"}
_FOLLOWERS = {ExitCode.DONE, ExitCode.TRANSIENT, ExitCode.PREEMPTED}  # how ranks end when another one is the cause
_JOB_EXIT_CODE = re.compile(r"failed with exit code (\d+)")


def _a_person_must_act(evidence: Evidence) -> Verdict | None:
    for end in evidence.endings:
        if end.code in NEVER_RETRIED:
            return Verdict(Cause.PERMANENT, end.reason, end.message)
    return None


def _out_of_memory(evidence: Evidence) -> Verdict | None:
    for end in evidence.endings:
        if end.code == ExitCode.OUT_OF_MEMORY:
            return Verdict(Cause.OUT_OF_MEMORY, end.reason, end.message, end.shrink_helps)
    for pod in evidence.pods:
        if pod.oom_killed:
            text = f"Pod {pod.name} was killed because it used more memory than its limit"
            return Verdict(Cause.OUT_OF_MEMORY, OUT_OF_HOST_MEMORY, text)
    return None


def _node_lost(evidence: Evidence) -> Verdict | None:
    for pod in evidence.pods:
        if pod.phase == "Unknown" or pod.reason == "NodeLost" or (pod.grace_over and not pod.ended):
            return Verdict(Cause.INFRASTRUCTURE, "NodeLost", f"Pod {pod.name} on node {pod.node} can't be reached")
    return None


def _disrupted(evidence: Evidence) -> Verdict | None:
    for pod in evidence.pods:
        if pod.disrupted or pod.reason in _DISRUPTED_REASONS:
            return _preempted(evidence, f"Pod {pod.name}: {pod.disrupted or pod.message or pod.reason}")
    return None


def _over_its_own_limit(evidence: Evidence) -> Verdict | None:
    """An eviction that is no disruption: the pod itself used more disk or shared memory than it may."""
    for pod in evidence.pods:
        if pod.reason == "Evicted":
            return Verdict(Cause.FAILURE, "Evicted", f"Pod {pod.name} was evicted: {pod.message or 'no reason given'}")
    return None


def _a_process_failed(evidence: Evidence) -> Verdict | None:
    for end in evidence.endings:
        if end.code not in _FOLLOWERS and not (end.pod and end.pod.terminating and end.pod.word is None):
            return Verdict(Cause.FAILURE, end.reason, end.message)
    return None


def _asked_to_stop(evidence: Evidence) -> Verdict | None:
    """Pods that are deleted after another one failed are asked to stop, too: they don't count while one ended by itself."""
    by_itself = [end for end in evidence.endings if not (end.pod and end.pod.terminating)]
    if any(end.code == ExitCode.PREEMPTED for end in by_itself):
        return _preempted(evidence, "The trainer was asked to stop")
    deleted = [pod for pod in evidence.pods if pod.terminating and pod.ended]
    if deleted and all(end.code == ExitCode.DONE for end in by_itself):
        return _preempted(evidence, f"Pod {deleted[0].name} was deleted")
    return None


def _the_job_was_disrupted(evidence: Evidence) -> Verdict | None:
    if "DisruptionTarget" in _job_message(evidence.child):
        return _preempted(evidence, "A pod was disrupted")
    return None


def _transient(evidence: Evidence) -> Verdict | None:
    for end in evidence.endings:
        if end.code != ExitCode.DONE:
            return Verdict(Cause.FAILURE, end.reason, end.message)
    return None


def _left_without_result(evidence: Evidence) -> Verdict | None:
    if evidence.endings or (evidence.child is not None and evidence.child.complete):
        text = "The trainer ended with exit code 0, but final/manifest.json is missing"
        return Verdict(Cause.FAILURE, "NoResult", text)
    return None


def _gone_without_a_word(evidence: Evidence) -> Verdict | None:
    message = _job_message(evidence.child)
    detail = f" ({message})" if message else ""
    return Verdict(Cause.INFRASTRUCTURE, "PodsGone", f"The pods are gone without a word{detail}")


RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _a_person_must_act,
    _out_of_memory,
    _node_lost,
    _disrupted,
    _over_its_own_limit,
    _the_job_was_disrupted,
    _a_process_failed,
    _asked_to_stop,
    _transient,
    _left_without_result,
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
    """Whether an attempt is over: its Job says so, or all that still lives can't be reached any more.

    The Job controller says nothing of a pod on a lost node: that pod never reaches a final phase.
    """
    unfinished = [pod for pod in pods if not pod.ended]
    return (child.finished or bool(unfinished)) and all(pod.grace_over for pod in unfinished)


def _ending_of(pod: PodView) -> Ending:
    word, code = pod.word, pod.exit_code
    if word is not None and (word.code or not code):
        return _ending_in_words(word, pod)
    assert code is not None, "the caller has looked"
    return Ending(code, reason_of(code), f"Pod {pod.name} ended with {_exit_words(code)}", pod)


def _ending_in_words(word: ExitWord, pod: PodView | None = None) -> Ending:
    return Ending(word.code, word.reason, word.message, pod, word.shrink_helps)


def _job_message(child: ChildView | None) -> str:
    return (child.failed or child.failing or "") if child else ""


def _preempted(evidence: Evidence, why: str) -> Verdict:
    saved = evidence.saved_step
    text = f"{why}; saved at step {saved}" if saved is not None else f"{why}; it could not save any more"
    return Verdict(Cause.PREEMPTION, "Preempted", text)


def _exit_words(code: int) -> str:
    if code > 128:
        return f"exit code {code} (signal {code - 128})"
    return f"exit code {code}"
