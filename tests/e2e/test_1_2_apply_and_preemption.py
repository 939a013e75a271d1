"""From `kubectl apply` to an adapter that loads in diffusers, undisturbed and preempted: the same adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.world import Object, World, condition, manifest

STEPS, EVERY = 400, 40


@pytest.fixture(scope="module")
def namespace(world: World) -> Iterator[str]:
    with world.namespace("story-main") as name:
        yield name


@pytest.fixture(scope="module")
def undisturbed(world: World, namespace: str) -> tuple[Object, list[list[str]], list[Object]]:
    """The job after it has succeeded, the rows that `kubectl get ltj` showed on the way, and every status seen."""
    rows: list[list[str]] = []
    seen: list[Object] = []

    def look(job: Object) -> None:
        seen.append(job)
        rows.append(world.columns(namespace, "mascot"))

    world.apply(manifest(namespace, "mascot", steps=STEPS, save_every=EVERY))
    return world.wait_phase(namespace, "mascot", "Succeeded", each=look), rows, seen


def test_an_applied_job_succeeds_and_its_table_row_is_right_at_every_moment(undisturbed) -> None:
    _job, rows, seen = undisturbed
    phases = [row[1] for row in rows if len(row) > 3]
    assert set(phases) <= {"Pending", "Running", "Succeeded"}, rows
    assert "Running" in phases, rows
    assert phases[-1] == "Succeeded", rows
    steps = [j["status"]["progress"]["step"] for j in seen if "progress" in j.get("status", {})]
    assert steps == sorted(steps), "the step never goes back"
    last = rows[-1]
    assert last[2:5] == ["zimage", str(STEPS), "100%"], last
    assert re.fullmatch(r"\d+\.\d+", last[5]), last
    assert last[6:8] == ["0s", "0"], last


def test_conditions_and_events_tell_the_story(world: World, namespace: str, undisturbed) -> None:
    job, _, _ = undisturbed
    for kind, status in (
        ("Ready", "True"),
        ("Succeeded", "True"),
        ("Failed", "False"),
        ("Running", "False"),
        ("Accepted", "True"),
    ):
        assert condition(job, kind)["status"] == status, (kind, condition(job, kind))
    assert condition(job, "Reconciling")["status"] == condition(job, "Stalled")["status"] == "False"
    reasons = [reason for reason, _ in world.events(namespace, "mascot")]
    for reason in ("Accepted", "Created", "Started", "CheckpointSaved", "CheckpointsRemoved", "Succeeded"):
        assert reason in reasons, reasons
    described = world.cluster.kubectl("describe", "ltj", "mascot", "-n", namespace)
    assert "Trained 400 steps" in described


def test_the_last_checkpoints_are_in_s3_and_the_older_ones_are_gone(world: World, namespace: str, undisturbed) -> None:
    job, _, _ = undisturbed
    kept = world.manifests(f"{namespace}/mascot")
    assert sorted(kept) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]
    folders = {key.split("/")[3] for key in world.keys(f"{namespace}/mascot/checkpoints/")}
    assert len(folders) == 3, "no file of an older checkpoint is left"
    ledger = job["status"]["checkpoints"]
    assert [entry["step"] for entry in ledger["entries"]] == sorted(kept, reverse=True)
    assert ledger["removed"] == STEPS // EVERY - 3


def test_the_adapter_loads_in_a_fresh_diffusers_pipeline_and_changes_its_output(
    world: World, namespace: str, undisturbed, tiny_model: Path, tmp_path: Path
) -> None:
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline

    file = tmp_path / "adapter.safetensors"
    file.write_bytes(world.read(f"{namespace}/mascot/final/adapter.safetensors") or b"")

    def draw(pipe: object) -> np.ndarray:
        generator = torch.Generator().manual_seed(1)
        drawn = pipe(
            "a photo of mascotxyz", height=64, width=64, num_inference_steps=2, generator=generator, output_type="np"
        )
        return np.asarray(drawn.images[0])

    before = draw(DiffusionPipeline.from_pretrained(tiny_model))
    pipe = DiffusionPipeline.from_pretrained(tiny_model)
    pipe.load_lora_weights(str(file))
    assert np.abs(draw(pipe) - before).max() > 1e-3


def test_a_job_that_is_preempted_waits_resumes_and_ends_with_the_same_adapter(
    world: World, namespace: str, undisturbed
) -> None:
    world.cluster.set_gpus(world.cluster.node_names()[0], 1)
    world.scheduling.create_priority_class({"metadata": {"name": "urgent"}, "value": 100000})
    run = f"{namespace}/preempted"
    world.apply(manifest(namespace, "preempted", steps=STEPS, save_every=EVERY, resources={"gpusPerNode": 1}))
    world.wait_checkpoint(run)

    world.core.create_namespaced_pod(namespace, gpu_pod("urgent", world.operator_image))
    waiting = world.wait_phase(namespace, "preempted", "Interrupted")
    waiting = world.wait_job(
        namespace, "preempted", lambda job: "nvidia.com/gpu" in condition(job, "Interrupted")["message"], 60
    )
    assert waiting["status"]["phase"] == "Interrupted"
    saved = max(world.manifests(run))
    assert f"saved at step {saved}" in condition(waiting, "Interrupted")["message"]

    world.core.delete_namespaced_pod("urgent", namespace, grace_period_seconds=0)
    job = world.wait_phase(namespace, "preempted", "Succeeded")
    assert job["status"]["progress"]["resumedFromStep"] == saved
    assert job["status"]["restarts"] == {"preemption": 1, "failure": 0, "outOfMemory": 0, "infrastructure": 0}
    assert job["status"]["lostSteps"] == 0
    assert world.adapter_digest(run) == world.adapter_digest(f"{namespace}/mascot")
    reasons = [reason for reason, _ in world.events(namespace, "preempted")]
    assert "Interrupted" in reasons
    assert "Resumed" in reasons


def gpu_pod(name: str, image: str) -> Object:
    """A pod of higher priority that takes the only GPU."""
    return {
        "metadata": {"name": name},
        "spec": {
            "priorityClassName": "urgent",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "work",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": ["python3", "-c", "import signal; signal.pause()"],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
