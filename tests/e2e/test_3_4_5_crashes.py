"""A killed trainer, a killed operator, a damaged checkpoint: nothing is lost that was committed, nothing runs twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.world import BUCKET, Object, World, condition, manifest

LONG = 4000  # steps: the trainer is killed long before


@pytest.fixture(scope="module")
def namespace(world: World) -> Iterator[str]:
    with world.namespace("story-crashes") as name:
        yield name


def kill_after_checkpoints(world: World, namespace: str, name: str, count: int = 2) -> list[int]:
    """Kills the trainer without grace once so many checkpoints are committed; returns the committed steps."""
    world.wait_checkpoint(f"{namespace}/{name}", count)
    (pod,) = [
        p for p in world.pods(namespace) if p.metadata.name.startswith(f"{name}-") and p.status.phase == "Running"
    ]
    assert world.kill_trainer(pod.metadata.name) >= 1
    return sorted(world.manifests(f"{namespace}/{name}"))


def is_second_attempt_waiting(job: Object) -> bool:
    status = job.get("status", {})
    return status.get("attempt") == 2 and "retryAt" in status


def test_a_killed_trainer_resumes_from_the_last_periodic_checkpoint_and_counts_as_failure(
    world: World, namespace: str
) -> None:
    run = f"{namespace}/killed"
    world.apply(manifest(namespace, "killed", steps=400, save_every=40))
    steps = kill_after_checkpoints(world, namespace, "killed")
    job = world.wait_phase(namespace, "killed", "Succeeded")
    assert job["status"]["restarts"]["failure"] == 1
    assert job["status"]["restartsTotal"] == 1
    assert job["status"]["progress"]["resumedFromStep"] in (steps[-1], steps[-1] + 40), "a commit may have won the race"
    assert job["status"]["lostSteps"] >= 0
    assert world.adapter_digest(run)


def test_without_retries_a_killed_trainer_fails_the_job_with_the_reason(world: World, namespace: str) -> None:
    world.apply(manifest(namespace, "no-retries", steps=LONG, save_every=40, runPolicy={"backoffLimit": 0}))
    kill_after_checkpoints(world, namespace, "no-retries", 1)
    job = world.wait_phase(namespace, "no-retries", "Failed")
    assert "exit code 137" in condition(job, "Failed")["message"]
    assert "backoffLimit" in condition(job, "Failed")["message"]
    assert condition(job, "Stalled")["status"] == "True"
    assert job["status"]["restartsTotal"] == 0


def test_an_operator_killed_while_a_job_trains_starts_nothing_twice(world: World, namespace: str) -> None:
    world.apply(manifest(namespace, "orphaned", steps=1200, save_every=100))
    world.wait_checkpoint(f"{namespace}/orphaned")
    world.delete_operator_pod()
    job = world.wait_phase(namespace, "orphaned", "Succeeded")
    assert job["status"]["attempt"] == 1
    assert job["status"]["restartsTotal"] == 0
    jobs = [
        j.metadata.name
        for j in world.batch.list_namespaced_job(namespace).items
        if j.metadata.name.startswith("orphaned")
    ]
    assert jobs == ["orphaned-1"]
    assert sum(reason == "Created" for reason, _ in world.events(namespace, "orphaned")) == 1


def test_an_operator_killed_while_a_restart_is_pending_loses_no_count(world: World, namespace: str) -> None:
    world.apply(manifest(namespace, "pending", steps=400, save_every=40))
    kill_after_checkpoints(world, namespace, "pending", 1)
    world.wait_job(namespace, "pending", is_second_attempt_waiting, 60)
    world.delete_operator_pod()
    job = world.wait_phase(namespace, "pending", "Succeeded")
    assert job["status"]["attempt"] == 2
    assert job["status"]["restarts"] == {"preemption": 0, "failure": 1, "outOfMemory": 0, "infrastructure": 0}


def test_a_truncated_newest_checkpoint_is_reported_and_the_one_before_is_used(world: World, namespace: str) -> None:
    run = f"{namespace}/truncated"
    world.apply(manifest(namespace, "truncated", steps=400, save_every=40))
    kill_after_checkpoints(world, namespace, "truncated")
    world.wait_job(namespace, "truncated", is_second_attempt_waiting, 60)
    committed = world.manifests(run)
    newest = max(committed)
    folder = committed[newest].removesuffix("manifest.json")
    victim = next(key for key in world.keys(folder) if key.endswith("adapter.safetensors"))
    import io

    half = (world.read(victim) or b"")[:100]
    world.s3.put_object(bucket_name=BUCKET, object_name=victim, data=io.BytesIO(half), length=len(half))
    before = sorted(committed)[-2]

    job = world.wait_phase(namespace, "truncated", "Succeeded")
    assert job["status"]["progress"]["resumedFromStep"] == before
    told = dict(world.events(namespace, "truncated"))
    assert f"step {newest}" in told["CheckpointRejected"], told
    assert "size" in told["CheckpointRejected"].lower() or "bytes" in told["CheckpointRejected"], told
