"""Only bad manifests: each is refused by the server or told in its conditions, with the field or file; each can go."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.world import Object, World, condition, manifest

MODEL = {"arch": "zimage", "name_or_path": "s3://models/tiny-zimage"}

REFUSED = {
    "an unknown key": ({"config": {"save": {"max_step_save": 3}}}, "max_step_save"),
    "a wrong type": ({"config": {"train": {"steps": "many"}}}, "spec.config.train.steps"),
    "no checkpoints kept": ({"config": {"save": {"max_step_saves": 0}}}, "spec.config.save.max_step_saves"),
    "no dataset": ({"config": {"datasets": []}}, "spec.config.datasets"),
    "nothing to train": ({"config": {"train": {"train_unet": False, "train_text_encoder": False}}}, "train_unet"),
    "an unknown family": ({"config": {"model": {**MODEL, "arch": "flux9"}}}, "spec.config.model.arch"),
    "a rank of zero": ({"config": {"network": {"linear": 0}}}, "spec.config.network.linear"),
    "a path that leaves the store": ({"output": {"path": "../other"}}, "spec.output.path"),
    "a negative back-off limit": ({"runPolicy": {"backoffLimit": -1}}, "spec.runPolicy.backoffLimit"),
}


@pytest.fixture(scope="module")
def namespace(world: World) -> Iterator[str]:
    with world.namespace("story-bad") as name:
        yield name


@pytest.mark.parametrize("case", REFUSED, ids=[name.replace(" ", "-") for name in REFUSED])
def test_the_server_refuses_and_names_the_field(world: World, namespace: str, case: str) -> None:
    spec, field = REFUSED[case]
    assert field in world.refused(manifest(namespace, "bad", **spec))


def test_a_field_that_defines_the_run_can_not_be_changed(world: World, namespace: str) -> None:
    made = manifest(namespace, "fixed", runPolicy={"suspend": True})
    world.apply(made)
    for change, field in (
        ({"config": {"network": {"linear": 8}}}, "network"),
        ({"config": {"train": {"seed": 8}}}, "seed"),
        ({"config": {"model": {"arch": "flux2_klein_4b"}}}, "model"),
        ({"output": {"path": "elsewhere/run"}}, "output"),
    ):
        changed = manifest(namespace, "fixed", **{"runPolicy": {"suspend": True}, **change})
        assert field in world.refused(changed)
    for change in ({"config": {"train": {"steps": 900}}}, {"config": {"save": {"save_every": 9, "max_step_saves": 9}}}):
        world.apply(manifest(namespace, "fixed", **{"runPolicy": {"suspend": True}, **change}))
    delete_and_wait(world, namespace, "fixed")


WAITING: dict[str, tuple[Object, list[str]]] = {
    "a profile that does not exist": ({"profile": "fancy"}, ["spec.profile", "fancy"]),
    "a store that the profile lacks": ({"output": {"store": "nowhere"}}, ["spec.output.store", "nowhere", "default"]),
    "a bucket that does not exist": ({"output": {"store": "no-bucket"}}, ["no-bucket", "missing-bucket"]),
}


@pytest.mark.parametrize("case", WAITING, ids=[name.replace(" ", "-") for name in WAITING])
def test_what_is_missing_is_named_in_the_accepted_condition(world: World, namespace: str, case: str) -> None:
    spec, words = WAITING[case]
    check_not_accepted(world, namespace, "waiting", words, spec)


def test_a_missing_secret_is_named_and_the_job_runs_once_it_is_there(world: World) -> None:
    with world.namespace("story-secretless", secret=False) as namespace:
        world.apply(manifest(namespace, "keyless", steps=20, save_every=10))
        job = world.wait_job(namespace, "keyless", is_not_accepted, 60)
        message = condition(job, "Accepted")["message"]
        assert "lora-store" in message
        assert namespace in message
        world.make_secret(namespace)
        world.wait_phase(namespace, "keyless", "Succeeded")


BAD_DATA: dict[str, tuple[str, bytes, list[str]]] = {
    "a dataset without pictures": ("notes.md", b"no pictures here", ["s3://datasets/empty-1", "no pictures"]),
    "a caption that is not UTF-8": ("photo.txt", b"caf\xe9", ["s3://datasets/latin-1/photo.txt", "UTF-8"]),
}


@pytest.mark.parametrize("case", BAD_DATA, ids=[name.replace(" ", "-") for name in BAD_DATA])
def test_bad_data_fails_the_job_at_once_with_the_file_named(
    world: World, namespace: str, case: str, photo: bytes
) -> None:
    name, content, words = BAD_DATA[case]
    folder = "empty-1" if name == "notes.md" else "latin-1"
    files = {name: content} if name == "notes.md" else {name: content, "photo.png": photo}
    for file, data in files.items():
        world.s3.put_object(
            bucket_name="datasets", object_name=f"{folder}/{file}", data=io.BytesIO(data), length=len(data)
        )
    dataset: dict[str, Any] = {"datasets": [{"folder_path": f"s3://datasets/{folder}", "resolution": [64]}]}
    world.apply(manifest(namespace, folder, config=dataset))
    job = world.wait_phase(namespace, folder, "Failed")
    for word in words:
        assert word.lower() in condition(job, "Failed")["message"].lower()
    assert job["status"]["restartsTotal"] == 0
    delete_and_wait(world, namespace, folder)


def check_not_accepted(world: World, namespace: str, name: str, words: list[str], spec: Object) -> None:
    world.apply(manifest(namespace, name, **spec))
    job = world.wait_job(namespace, name, is_not_accepted, 60)
    for word in words:
        assert word in condition(job, "Accepted")["message"]
    assert condition(job, "Stalled")["status"] == "True"
    assert world.batch.list_namespaced_job(namespace).items == []
    delete_and_wait(world, namespace, name)


def is_not_accepted(job: Object) -> bool:
    return any(c["type"] == "Accepted" and c["status"] == "False" for c in job.get("status", {}).get("conditions", []))


def delete_and_wait(world: World, namespace: str, name: str) -> None:
    world.cluster.kubectl("delete", "ltj", name, "-n", namespace, "--timeout=60s")
    world.wait("its children to be gone", lambda: not world.batch.list_namespaced_job(namespace).items, 60)
