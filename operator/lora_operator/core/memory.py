"""What follows when memory ran out: a smaller run, the same again, or the end with advice. See `lora_api.shrink`."""

from __future__ import annotations

from dataclasses import dataclass

from lora_api.job import ShrunkStatus
from lora_api.shrink import can_shrink, passes
from lora_operator.core.classify import OUT_OF_HOST_MEMORY, Cause, Verdict
from lora_operator.core.facts import heartbeat
from lora_operator.core.manifests import sizing
from lora_operator.core.views import Observed

_LESS_PER_SAMPLE = "quantize the base model (model.quantize), lower datasets[].resolution or network.linear in spec.config, or use a GPU with more memory"
_MORE_HOST_MEMORY = "raise spec.resources.memory"


@dataclass(frozen=True)
class Remedy:
    """What is done about memory that ran out, and how it is told.

    Attributes:
        verdict: Of the attempt, with what is done about it in its message.
        shrunk: How the next attempt is trained; None leaves it as it was.
        event: What is told of the smaller run; empty when there is none.
    """

    verdict: Verdict
    shrunk: ShrunkStatus | None = None
    event: str = ""


def remedy_for(o: Observed, verdict: Verdict) -> Remedy:
    """What to do about an end for want of memory, as `spec.runPolicy.oomPolicy` says.

    Returns:
        With a verdict that is permanent: nothing can be done but by a person. With `shrunk`: the next attempt is different, so
        it neither waits nor counts as a retry. Else: the next attempt is a retry like any other.
    """
    assert o.job is not None, "a job without a valid spec was not accepted"
    train, policy, done = o.job.spec.config.train, o.job.spec.run_policy.oom_policy, times_shrunk(o)
    if policy == "Fail":
        return Remedy(_permanent(verdict, f"Not tried again, as oomPolicy: Fail asks; {_advice(o, verdict)}"))
    if policy == "Retry" or not _smaller_steps_help(o, verdict):
        return Remedy(_told(verdict, _advice(o, verdict)))
    now = passes(train, done)
    if not can_shrink(train, done):
        return Remedy(_permanent(verdict, f"With {now} nothing is left to make smaller; {_advice(o, verdict)}"))
    then = passes(train, done + 1)
    shrunk = ShrunkStatus(
        times=done + 1,
        batch_size=then.batch_size,
        gradient_accumulation=then.gradient_accumulation,
        gradient_checkpointing=then.gradient_checkpointing,
    )
    told = _told(verdict, f"The next attempts train {then} instead of {now}")
    event = f"Attempt {o.status.attempt + 1} trains {then} instead of {now}; the samples of each step stay the same"
    return Remedy(told, shrunk, event)


def times_shrunk(o: Observed) -> int:
    """How often the run was made smaller so far."""
    return o.status.shrunk.times if o.status.shrunk else 0


def retried_failures(o: Observed) -> int:
    """Restarts so far that count against `backoffLimit`: those that made the run smaller do not."""
    restarts = o.status.restarts
    return restarts.failure + max(0, restarts.out_of_memory - times_shrunk(o))


def _smaller_steps_help(o: Observed, verdict: Verdict) -> bool:
    """Whether training steps ran out of what they need less of with smaller micro-batches.

    A process that the kernel kills says nothing. What fills a host's memory is mostly the loading of models and data, but where
    the training runs on the CPU, too, and had begun, its activations lie there.
    """
    if verdict.reason != OUT_OF_HOST_MEMORY:
        return verdict.shrink_helps
    beat = heartbeat(o)
    return _trains_on_cpu(o) and beat is not None and beat.stage == "Training"


def _trains_on_cpu(o: Observed) -> bool:
    return o.job is not None and o.profile is not None and sizing(o.job, o.profile)[1] == 0


def _advice(o: Observed, verdict: Verdict) -> str:
    assert o.job is not None, "the caller has looked"
    if verdict.reason == OUT_OF_HOST_MEMORY:
        return _MORE_HOST_MEMORY
    shrinkable = verdict.shrink_helps and can_shrink(o.job.spec.config.train, times_shrunk(o))
    first = "set oomPolicy to Shrink, " if shrinkable else ""
    return first + _LESS_PER_SAMPLE


def _permanent(verdict: Verdict, advice: str) -> Verdict:
    return Verdict(Cause.PERMANENT, verdict.reason, _sentences(advice, verdict.message))


def _told(verdict: Verdict, advice: str) -> Verdict:
    return Verdict(verdict.cause, verdict.reason, _sentences(advice, verdict.message), verdict.shrink_helps)


def _sentences(advice: str, message: str) -> str:
    """What is done comes first: what a device says of its memory is long, and conditions cut it."""
    return f"{advice[0].upper()}{advice[1:]}. {message[0].upper()}{message[1:]}"
