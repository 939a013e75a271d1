"""What the types can't say: rules across objects. Each problem names its field, what was found, what was expected."""

from __future__ import annotations

from lora_api.job import LoRATrainingJob, is_legal_name
from lora_api.problems import Problem
from lora_api.profile import LoRATrainingProfile
from lora_operator.core.views import RunView


def problems_of_job(
    job: LoRATrainingJob, profile: LoRATrainingProfile | None = None, *, in_cluster: bool = False
) -> list[Problem]:
    """All that is wrong with a job that fits its type; without a profile, what can be said without one."""
    problems = _name_problems(job)
    if profile is not None:
        problems += _store_problems(job, profile, in_cluster=in_cluster)
    problems += _device_problems(job, profile)
    return problems


def problems_of_run(job: LoRATrainingJob, run: RunView) -> list[Problem]:
    """Whether the run directory may be written by this job."""
    if run.owner is None or run.owner.uid == job.metadata.uid or job.spec.output.if_exists == "Continue":
        return []
    text = (
        f"{run.location} belongs to job {run.owner.namespace}/{run.owner.job_name} (uid {run.owner.uid}); "
        "choose another path, or set spec.output.ifExists to Continue"
    )
    return [Problem("spec.output.path", text)]


def _name_problems(job: LoRATrainingJob) -> list[Problem]:
    found = []
    for field in ("name", "namespace"):
        value = getattr(job.metadata, field)
        if not is_legal_name(value):
            text = f"{value!r} is not a legal name: lower-case letters, digits, '-' and '.', at most 253 characters"
            found.append(Problem(f"metadata.{field}", text))
    return found


def _store_problems(job: LoRATrainingJob, profile: LoRATrainingProfile, *, in_cluster: bool) -> list[Problem]:
    wanted = job.spec.output.store
    store = profile.spec.store(wanted)
    if store is None:
        names = ", ".join(sorted(s.name for s in profile.spec.stores))
        return [
            Problem(
                "spec.output.store", f"{wanted!r} is not a store of profile {profile.metadata.name!r}; it has: {names}"
            )
        ]
    if in_cluster and store.type == "directory":
        text = f"store {wanted!r} of profile {profile.metadata.name!r} is a directory, which pods can't reach; expected type s3"
        return [Problem("spec.output.store", text)]
    if in_cluster:
        missing = [
            field for field in ("operator_secret_name", "job_secret_name") if getattr(store.credentials, field) is None
        ]
        if missing:
            text = f"store {wanted!r} of profile {profile.metadata.name!r} names no Secret for its credentials"
            return [Problem("spec.output.store", text)]
    return []


def _device_problems(job: LoRATrainingJob, profile: LoRATrainingProfile | None) -> list[Problem]:
    gpus = job.spec.resources.gpus_per_node
    if gpus is None and profile is not None:
        gpus = profile.spec.sizing.gpus_per_node
    if job.spec.config.device == "cuda" and gpus == 0:
        return [
            Problem(
                "spec.config.device",
                "cuda needs a GPU, but the pods get none; set spec.resources.gpusPerNode to at least 1, or device to cpu",
            )
        ]
    return []
