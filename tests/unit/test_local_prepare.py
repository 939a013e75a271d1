"""From a manifest and options to a local run: paths, stores, sizing, folders, credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_api.job import LoRATrainingJob
from lora_api.problems import parse
from lora_operator.local.machine import credentials_from, find_gpus, gpu_memory_gib
from lora_operator.local.prepare import SECRET, Options, UserError, fit_to_machine, prepare, store_from_option
from tests.local_runs import job_manifest

KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hush"}
S3 = {"store": "s3://runs/here", "endpoint": "http://localhost:9000"}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = tmp_path / "jobs"
    for name in ("model", "data"):
        (jobs / name).mkdir(parents=True)

    def prepared(manifest=None, variables=None, **options):
        (jobs / "job.yaml").write_text(json.dumps(manifest or job_manifest()))
        return prepare(Options("jobs/job.yaml", **options), {"HOME": str(tmp_path), **(variables or {})})

    return prepared


def with_resources(manifest, **resources):
    manifest["spec"]["resources"] = resources
    return manifest


def profile_of(tmp_path, **spec):
    raw = {
        "apiVersion": "lora-operator.io/v1alpha1",
        "kind": "LoRATrainingProfile",
        "metadata": {"name": "team"},
        "spec": {"stores": [{"name": "default", "type": "directory", "directory": "/x"}], "trainer": {"image": "t"}}
        | spec,
    }
    (tmp_path / "profile.yaml").write_text(json.dumps(raw))
    return "profile.yaml"


def test_relative_folders_are_relative_to_the_manifest_and_the_store_to_the_working_folder(bench, tmp_path):
    prepared = bench()
    config = prepared.manifest["spec"]["config"]
    assert config["model"]["name_or_path"] == str(tmp_path / "jobs/model")
    assert config["datasets"][0]["folder_path"] == str(tmp_path / "jobs/data")
    assert prepared.store.location == str(tmp_path / "runs")
    assert prepared.state.folder == tmp_path / "runs/.lora-operator/default/stub"
    assert prepared.output_path == "default/stub"


def test_locations_in_an_s3_store_are_left_alone(bench):
    prepared = bench(job_manifest(model__name_or_path="s3://models/z"), KEYS, **S3)
    assert prepared.manifest["spec"]["config"]["model"]["name_or_path"] == "s3://models/z"


def test_missing_folders_are_said_before_anything_starts(bench, tmp_path):
    with pytest.raises(UserError) as caught:
        bench(job_manifest(model__name_or_path="m", datasets=[{"folder_path": "data"}, {"folder_path": "nodata"}]))
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        f"jobs/job.yaml: spec.config.model.name_or_path: the folder {tmp_path}/jobs/m does not exist"
    )
    assert second.startswith("jobs/job.yaml: spec.config.datasets[1].folder_path:")


def test_an_invalid_manifest_is_refused_with_every_problem(bench):
    with pytest.raises(UserError, match=r"train\.steps: 0 is below the minimum 1"):
        bench(job_manifest(train__steps=0))


def test_a_suspended_job_would_run_nothing_and_is_refused(bench):
    manifest = job_manifest()
    manifest["spec"]["runPolicy"] = {"suspend": True}
    with pytest.raises(UserError, match=r"spec\.runPolicy\.suspend: true asks for nothing to be run"):
        bench(manifest)


def test_a_file_without_a_job_says_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("kind: Secret\n")
    with pytest.raises(UserError, match=r"x\.yaml: holds no LoRATrainingJob: x\.yaml: kind: 'Secret'"):
        prepare(Options("x.yaml"), {})
    Path("two.yaml").write_text(json.dumps(job_manifest()) + "\n---\n" + json.dumps(job_manifest()))
    with pytest.raises(UserError, match="holds 2 documents of kind LoRATrainingJob, expected one"):
        prepare(Options("two.yaml"), {})


def test_an_s3_store_keeps_its_state_in_the_users_folder_and_its_keys_in_a_secret(bench, tmp_path):
    prepared = bench(None, KEYS | {"XDG_STATE_HOME": str(tmp_path / "xdg")}, **S3)
    assert prepared.store.location == "s3://runs/here/"
    assert prepared.state.folder.is_relative_to(tmp_path / "xdg/lora-operator")
    assert prepared.machine.secrets == {SECRET: {"accessKey": "me", "secretKey": "hush"}}
    (store,) = prepared.profile["spec"]["stores"]
    assert store["credentials"]["jobSecretName"] == SECRET
    assert "hush" not in repr(prepared)


def test_jobs_of_one_name_in_two_stores_are_two_runs(bench):
    here, there = bench(store="a"), bench(store="b")
    assert here.uid != there.uid
    assert here.state.folder != there.state.folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "s3://runs"}, "an S3 store needs its server too"),
        ({"store": "s3://runs", "endpoint": "localhost:9000"}, "endpoint"),
        ({"store": "s3://Bad_Bucket", "endpoint": "http://x:1"}, "bucket"),
        (S3, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
    ids=str,
)
def test_a_store_that_can_not_be_meant_is_refused(bench, options, message):
    with pytest.raises(UserError, match=message):
        bench(**options)


def test_the_store_of_a_given_profile_is_used_unless_the_command_names_one(bench, tmp_path):
    profile = profile_of(tmp_path, stores=[{"name": "default", "type": "directory", "directory": str(tmp_path / "p")}])
    assert bench(profile=profile).store.location == str(tmp_path / "p")
    assert bench(profile=profile, store="mine").store.location == str(tmp_path / "mine")
    assert bench(profile=profile).profile["metadata"]["name"] == "default", "the job's name for it"


def test_a_bad_profile_is_refused_with_its_own_file_name(bench, tmp_path):
    profile = profile_of(tmp_path, stores=[])
    with pytest.raises(UserError, match=r"profile\.yaml: spec\.stores"):
        bench(profile=profile)


def fitted(manifest, gpus, tmp_path):
    profile = prepare_profile(tmp_path)
    fitted_manifest, notes = fit_to_machine(manifest, profile, gpus)
    job = parse(LoRATrainingJob, fitted_manifest)
    return job.spec.resources.nodes, job.spec.resources.gpus_per_node, job.spec.config.device, notes


def prepare_profile(tmp_path):
    from lora_operator.local.prepare import _made_up_profile

    return _made_up_profile("default", store_from_option(str(tmp_path), None, "default"), has_gpu=True)


def test_without_a_gpu_it_is_trained_on_the_cpu_and_said(tmp_path):
    nodes, gpus, device, notes = fitted(with_resources(job_manifest(device="cuda"), gpusPerNode=2), (), tmp_path)
    assert (nodes, gpus, device) == (None, 0, "cpu")
    assert notes == ["no GPU was found on this machine: training on the CPU"]


def test_a_job_for_the_cpu_says_nothing_about_gpus(tmp_path):
    assert fitted(job_manifest(device="cpu"), (), tmp_path) == (None, 0, "cpu", [])


def test_a_job_for_the_cpu_takes_no_gpu_where_there_are_some(tmp_path):
    assert fitted(with_resources(job_manifest(device="cpu"), gpusPerNode=1), ("0",), tmp_path)[1] == 0


def test_one_gpu_is_taken_when_nothing_is_asked(tmp_path):
    assert fitted(job_manifest(device="auto"), ("0", "1"), tmp_path) == (1, 1, "auto", [])


@pytest.mark.parametrize(
    ("asked", "there", "taken"),
    [((2, 4), 8, (2, 4)), ((2, 4), 4, (1, 4)), ((1, 8), 2, (1, 2)), ((4, 1), 2, (2, 1))],
    ids=str,
)
def test_more_gpus_than_there_are_become_what_there_is(tmp_path, asked, there, taken):
    manifest = with_resources(job_manifest(device="cuda"), nodes=asked[0], gpusPerNode=asked[1])
    nodes, gpus, device, notes = fitted(manifest, tuple(map(str, range(there))), tmp_path)
    assert (nodes, gpus, device) == (*taken, "cuda")
    assert bool(notes) == (asked != taken)


def test_gpus_are_found_without_torch_and_limited_by_cuda_visible_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert find_gpus({}, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert find_gpus({}, tmp_path) == ("0", "1")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ("1",)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == ("0",)


def test_the_memory_of_the_smallest_gpu_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_memory_gib({}, tmp_path) is None
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncase $1 in -L) echo 'GPU 0: one';; *) echo 81920; echo 24576;; esac\n")
    tool.chmod(0o755)
    assert gpu_memory_gib({}, tmp_path) == 24.0
    tool.write_text("#!/bin/sh\ncase $1 in -L) echo 'GPU 0: one';; *) echo '[N/A]';; esac\n")
    assert gpu_memory_gib({}, tmp_path) is None


@pytest.mark.parametrize(
    "names",
    [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"),
        ("MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"),
    ],
)
def test_credentials_come_from_the_names_that_other_tools_read(names):
    found = credentials_from(dict(zip(names, ("me", "hush"), strict=True)))
    assert (found.access_key, found.secret_key) == ("me", "hush")


def test_half_a_pair_of_keys_is_none():
    assert credentials_from({"AWS_ACCESS_KEY_ID": "me"}) is None
