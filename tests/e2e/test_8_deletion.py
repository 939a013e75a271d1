"""Deletion at any time, with and without the operator: no orphan, nothing stuck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.world import SYSTEM, World, manifest

STEPS = 400


def wait_until_nothing_is_left(world: World, namespace: str) -> None:
    def rest() -> list[str]:
        kinds = world.cluster.kubectl(
            "get", "ltj,jobs,pods,configmaps,services", "-n", namespace, "-o", "name", "--ignore-not-found"
        ).split()
        return [name for name in kinds if name != "configmap/kube-root-ca.crt"]

    world.wait(f"nothing to be left in {namespace}", lambda: not rest(), 120)


def reach(world: World, namespace: str, name: str, moment: str) -> None:
    """Applies a job and waits for the moment at which it is to be deleted."""
    spec = {"resources": {"gpusPerNode": 8}} if moment == "pending" else {}
    world.apply(manifest(namespace, name, steps=20 if moment == "done" else STEPS, save_every=20, **spec))
    if moment == "pending":
        world.wait_phase(namespace, name, "Queued")
    elif moment == "done":
        world.wait_phase(namespace, name, "Succeeded")
    else:
        world.wait_checkpoint(f"{namespace}/{name}")


@contextmanager
def operator_away(world: World) -> Iterator[None]:
    """The operator is scaled to nothing, and back at the end."""
    world.cluster.kubectl("scale", "deployment", "lora-operator", "-n", SYSTEM, "--replicas=0")
    label = "app.kubernetes.io/name=lora-operator"
    world.wait("the operator to go", lambda: not world.core.list_namespaced_pod(SYSTEM, label_selector=label).items, 60)
    try:
        yield
    finally:
        world.cluster.kubectl("scale", "deployment", "lora-operator", "-n", SYSTEM, "--replicas=1")
        world.wait("the operator to be back", world.operator_is_ready, 90)


@pytest.mark.parametrize("moment", ["pending", "training", "done"])
def test_a_deleted_job_leaves_nothing_behind_but_its_run_directory(world: World, moment: str) -> None:
    with world.namespace(f"story-delete-{moment}") as namespace:
        reach(world, namespace, "gone", moment)
        kept = world.keys(f"{namespace}/gone/")
        world.cluster.kubectl("delete", "ltj", "gone", "-n", namespace, "--timeout=60s")
        wait_until_nothing_is_left(world, namespace)
        assert set(kept) <= set(world.keys(f"{namespace}/gone/")) or moment == "training"


def test_a_job_deleted_while_it_saves_leaves_nothing_behind(world: World) -> None:
    with world.namespace("story-delete-saving") as namespace:
        reach(world, namespace, "gone", "training")
        (pod,) = world.pods(namespace)
        world.core.delete_namespaced_pod(pod.metadata.name, namespace)  # it begins to save
        world.cluster.kubectl("delete", "ltj", "gone", "-n", namespace, "--timeout=60s")
        wait_until_nothing_is_left(world, namespace)


def test_a_job_that_asks_for_it_takes_its_run_directory_along(world: World) -> None:
    with world.namespace("story-delete-run") as namespace:
        spec = {"output": {"deletionPolicy": "Delete"}}
        world.apply(manifest(namespace, "tidy", steps=20, save_every=10, **spec))
        world.apply(manifest(namespace, "tidy-2", steps=20, save_every=10))
        for name in ("tidy", "tidy-2"):
            world.wait_phase(namespace, name, "Succeeded")
        world.cluster.kubectl("delete", "ltj", "tidy", "-n", namespace, "--timeout=60s")
        assert world.keys(f"{namespace}/tidy/") == []
        assert world.keys(f"{namespace}/tidy-2/") != []


def test_without_the_operator_a_job_and_a_whole_namespace_can_be_deleted(world: World) -> None:
    with world.namespace("story-delete-alone") as namespace:
        reach(world, namespace, "alone", "training")
        world.apply(manifest(namespace, "second", resources={"gpusPerNode": 8}))
        world.wait_phase(namespace, "second", "Queued")
        with operator_away(world):
            world.cluster.kubectl("delete", "ltj", "alone", "-n", namespace, "--timeout=60s")
            world.core.delete_namespace(namespace)
            world.wait("the namespace to be gone", lambda: not world.namespace_exists(namespace), 120)
        world.core.create_namespace({"metadata": {"name": namespace}})  # for the end of the `with`


def test_with_the_operator_a_namespace_full_of_jobs_can_be_deleted(world: World) -> None:
    with world.namespace("story-delete-all") as namespace:
        reach(world, namespace, "one", "training")
        world.apply(manifest(namespace, "two", resources={"gpusPerNode": 8}))
        world.apply(manifest(namespace, "three", output={"deletionPolicy": "Delete"}, runPolicy={"suspend": True}))
        world.wait_phase(namespace, "two", "Queued")
    # leaving the block deletes the namespace and waits until it is gone
    assert not world.namespace_exists("story-delete-all")
