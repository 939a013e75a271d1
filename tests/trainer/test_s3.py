"""Model, data and run directory in a real S3 server."""

from __future__ import annotations

import shutil

import pytest

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.stores import Credentials
from lora_api.stores.s3 import S3Store
from tests.cluster.s3 import SeaweedS3
from tests.trainer.jobs import Job, make_pictures


@pytest.fixture(scope="module")
def seaweed():
    with SeaweedS3(buckets=["runs", "inputs"]) as running:
        yield running


def bucket(seaweed, name: str) -> S3Store:
    credentials = Credentials(seaweed.access_key, seaweed.secret_key)
    return S3Store.connect(seaweed.endpoint, name, "", region="us-east-1", credentials=credentials)


def upload(store: S3Store, prefix: str, folder) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(prefix + path.relative_to(folder).as_posix(), path)


@pytest.fixture
def job(seaweed, tmp_path, tiny_model_folder):
    inputs = bucket(seaweed, "inputs")
    upload(inputs, "models/z/", tiny_model_folder("zimage"))
    data = make_pictures(tmp_path / "data")
    upload(inputs, "data/", data)
    inputs.put("data-2/other.png", data / "0.png")  # a neighbour whose name begins the same
    shutil.rmtree(data)
    job = Job(tmp_path / "job", tmp_path, tmp_path, tmp_path / "cache", train={"steps": 4}, save={"save_every": 2})
    job.config["model"]["name_or_path"] = "s3://inputs/models/z"
    job.config["datasets"][0]["folder_path"] = "s3://inputs/data"
    job.document["store"] = {"name": "s3", "type": "s3", "endpoint": seaweed.endpoint, "bucket": "runs"}
    job.credentials = tmp_path / "secret"
    job.credentials.mkdir()
    (job.credentials / "accessKey").write_text(seaweed.access_key)
    (job.credentials / "secretKey").write_text(seaweed.secret_key + "\n")
    return job


def test_a_job_with_everything_in_s3_is_interrupted_resumed_and_finished(job, seaweed, caplog):
    caplog.set_level("INFO")
    assert job.run(stop_after=3) == ExitCode.PREEMPTED
    copies = {path: path.stat().st_mtime_ns for path in (job.cache / "s3").rglob("*") if path.is_file()}
    assert len([path for path in copies if path.suffix == ".png"]) == 5
    assert job.run() == ExitCode.DONE
    assert {path: path.stat().st_mtime_ns for path in (job.cache / "s3").rglob("*") if path.is_file()} == copies
    run = bucket(seaweed, "runs").sub("run")
    assert [item.key for item in run.list(layout.CHECKPOINTS) if layout.is_checkpoint_manifest(item.key)] == [
        layout.checkpoint_manifest(step, start) for step, start in ((2, 1), (3, 1), (4, 2))
    ]
    assert run.get(layout.FINAL_MANIFEST) is not None
    assert seaweed.secret_key not in caplog.text


def test_a_missing_bucket_ends_with_64_and_refused_credentials_with_77(job):
    job.document["store"]["bucket"] = "nowhere"
    assert job.run() == ExitCode.CONFIGURATION
    assert "bucket 'nowhere' does not exist" in job.word().message
    (job.credentials / "secretKey").write_text("wrong")
    assert job.run() == ExitCode.CREDENTIALS


def test_a_prefix_with_nothing_below_it_names_the_field(job):
    job.document["path"] = "another"
    job.config["datasets"][0]["folder_path"] = "s3://inputs/nothing"
    assert job.run() == ExitCode.DATA
    assert job.word().message.startswith("config.datasets[0].folder_path: nothing lies under s3://inputs/nothing")
