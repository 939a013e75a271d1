"""Small facts that follow from what is observed; rules are written in their words."""

from __future__ import annotations

from lora_api.job import JobStatus
from lora_api.run import FinalManifest, Progress
from lora_operator.core.views import ChildView, Observed, PodView


def uid_of(o: Observed) -> str:
    """The job's uid."""
    return str(o.raw["metadata"].get("uid", ""))


def is_foreign(o: Observed) -> bool:
    """Whether the run directory belongs to another job that this one was not told to continue."""
    if o.run is None or o.run.owner is None or o.run.owner.uid == uid_of(o):
        return False
    return o.job is None or o.job.spec.output.if_exists == "Refuse"


def own_result(o: Observed) -> FinalManifest | None:
    """The final manifest, if it is this job's: a directory that is continued may hold an earlier job's."""
    final = o.run.final if o.run else None
    return final if final is not None and final.uid == uid_of(o) else None


def heartbeat(o: Observed) -> Progress | None:
    """The last heartbeat, if it is one of the current attempt."""
    beat = o.run.progress if o.run else None
    mine = o.run is not None and o.run.owner is not None and o.run.owner.uid == uid_of(o)
    return beat if beat is not None and mine and beat.attempt == o.status.attempt else None


def has_saved(o: Observed) -> bool:
    """Whether the current attempt has committed a checkpoint. The newest is never removed."""
    manifests = o.run.manifests if o.run else ()
    return any(m.attempt == o.status.attempt and m.uid == uid_of(o) for m in manifests)


def has_run(status: JobStatus) -> bool:
    """Whether the current attempt was seen running. Kept in `stage`, which waiting does not clear."""
    return status.stage is not None


def living(pods: tuple[PodView, ...]) -> list[PodView]:
    """Pods whose containers may still run, except those that can't be reached and had their time."""
    return [pod for pod in pods if not pod.ended and not pod.grace_over]


def pods_in_the_way(o: Observed) -> list[PodView]:
    """Pods of any attempt that have to end before another attempt may begin."""
    return living(o.pods + o.stray_pods)


def all_children(o: Observed) -> tuple[ChildView, ...]:
    """Our Jobs of every attempt."""
    mine = (o.child,) if o.child is not None and o.child.ours else ()
    return (*mine, *o.other_children)


def unstopped(children: tuple[ChildView, ...]) -> tuple[tuple[str, str], ...]:
    """(name, uid) of the Jobs that could still start pods."""
    return tuple((child.name, child.uid) for child in children if not child.finished and not child.terminating)


def store_trouble(o: Observed) -> str:
    """Why the run directory can't be read."""
    return o.store_error or "; ".join(map(str, o.problems)) or "it has not been read yet"


def count_pods(number: int) -> str:
    """`1 pod`, `2 pods`."""
    return f"{number} pod" if number == 1 else f"{number} pods"
