"""Rules across objects: each names its field, what was found, what was expected."""

from __future__ import annotations

import pytest

from lora_operator.core.validate import problems_of_job, problems_of_run
from tests.unit.builders import JobBuilder, ProfileBuilder, RunBuilder


def texts(job: JobBuilder, profile: ProfileBuilder | None = None, *, in_cluster: bool = True) -> list[str]:
    found = problems_of_job(job.build(), profile.build() if profile else None, in_cluster=in_cluster)
    return [str(problem) for problem in found]


def test_a_job_in_order_has_no_problems() -> None:
    assert texts(JobBuilder(), ProfileBuilder()) == []
    assert texts(JobBuilder()) == []


@pytest.mark.parametrize("name", ["Mascot", "a..b", "-a", "a_b", "a" * 253 + "b"[:0] + "."])
def test_an_illegal_name_is_refused(name: str) -> None:
    job = JobBuilder().build()
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": name})})
    assert [problem.path for problem in problems_of_job(job)] == ["metadata.name"]


def test_a_store_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert texts(JobBuilder().with_output(store="fast"), ProfileBuilder()) == [
        "spec.output.store: 'fast' is not a store of profile 'default'; it has: default"
    ]


def test_a_directory_is_no_store_for_pods() -> None:
    manifest = ProfileBuilder()
    manifest._profile["spec"]["stores"] = [{"name": "default", "type": "directory", "directory": "/data"}]
    assert "is a directory, which pods can't reach; expected type s3" in texts(JobBuilder(), manifest)[0]
    assert texts(JobBuilder(), manifest, in_cluster=False) == []


@pytest.mark.parametrize("missing", ["operatorSecretName", "jobSecretName"])
def test_a_store_needs_both_secrets_in_a_cluster(missing: str) -> None:
    profile = ProfileBuilder()
    del profile._profile["spec"]["stores"][0]["credentials"][missing]
    assert "names no Secret for its credentials" in texts(JobBuilder(), profile)[0]
    assert texts(JobBuilder(), profile, in_cluster=False) == []


def test_cuda_needs_a_gpu_wherever_the_number_comes_from() -> None:
    without = ProfileBuilder().with_sizing(gpusPerNode=0)
    assert "cuda needs a GPU, but the pods get none" in texts(JobBuilder(), without)[0]
    job = JobBuilder()
    job._job["spec"]["resources"] = {"gpusPerNode": 1}
    assert texts(job, without) == []
    job._job["spec"]["resources"] = {"gpusPerNode": 0}
    assert texts(job)[0].startswith("spec.config.device: cuda needs a GPU")
    job._job["spec"]["config"]["device"] = "auto"
    assert texts(job) == []


def test_another_jobs_run_directory_is_refused_unless_told_to_continue_it() -> None:
    run = RunBuilder()
    assert problems_of_run(JobBuilder().build(), run.empty().build()) == []
    assert problems_of_run(JobBuilder().build(), RunBuilder().build()) == []
    theirs = run.of_another_job().build()
    problem = str(problems_of_run(JobBuilder().build(), theirs)[0])
    assert problem.startswith("spec.output.path: s3://runs/team-a/mascot/ belongs to job team-b/rival (uid other)")
    assert problems_of_run(JobBuilder().with_output(ifExists="Continue").build(), theirs) == []
