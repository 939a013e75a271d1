"""`lora-operator run` on a device without room for what is asked: real processes, the real trainer, a family that runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_api.stores import DirectoryStore
from lora_trainer.tiny import make_tiny
from tests import cramped_family
from tests.trainer.jobs import make_pictures

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def run(tmp_path: Path):
    """Runs a job of batches of four: exit code, output, status."""
    make_tiny("zimage", tmp_path / "model", 0)
    make_pictures(tmp_path / "data")
    config = {
        "device": "cpu",
        "model": {"arch": "x-cramped", "name_or_path": "model"},
        "network": {"linear": 2},
        "datasets": [{"folder_path": "data", "resolution": [64]}],
        "train": {"steps": 4, "batch_size": 4, "dtype": "fp32"},
    }
    job = {"apiVersion": "lora-operator.io/v1alpha1", "kind": "LoRATrainingJob", "metadata": {"name": "big"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"spec": {"config": config}}))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LORA_", "CRAMPED_"))}
    env |= {
        "PYTHONPATH": cramped_family.install(tmp_path / "site"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def call(**cramped: str) -> tuple[int, str, dict[str, Any]]:
        command = [sys.executable, "-m", "lora_operator", "run", "job.yaml", "--write-status", "status.json"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=env | cramped,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, json.loads((tmp_path / "status.json").read_text())["status"]

    return call


def test_a_job_that_does_not_fit_is_made_smaller_until_it_does(run, tmp_path):
    code, output, status = run(CRAMPED_MOST="1")
    assert code == 0, output
    assert (status["phase"], status["restarts"]["outOfMemory"], status["attempt"]) == ("Succeeded", 2, 3)
    expected = {"times": 2, "batchSize": 1, "gradientAccumulation": 4, "gradientCheckpointing": False}
    assert status["shrunk"] == expected
    assert "training step 1, forward pass of 4 pictures of 64 x 64" in output
    assert "CUDA out of memory. Tried to allocate 4 GiB" in output
    assert "Shrunk: Attempt 2 trains batch_size 2 x gradient_accumulation 2 instead of batch_size 4 x" in output
    assert "Shrunk: Attempt 3 trains batch_size 1 x gradient_accumulation 4 instead of batch_size 2 x" in output
    metrics = DirectoryStore(tmp_path / "runs" / "default" / "big").list("metrics/")
    assert [item.key for item in metrics] == ["metrics/000003.jsonl"], "the starts before trained no step"


def test_a_job_that_can_not_fit_fails_with_advice(run, tmp_path):
    code, output, status = run(CRAMPED_MOST="0")
    assert code == 1
    assert (status["phase"], status["restarts"]["outOfMemory"]) == ("Failed", 3)
    assert status["shrunk"]["gradientCheckpointing"] is True
    assert (
        "nothing is left to make smaller; quantize the base model (model.quantize), lower datasets[].resolution"
        in output
    )
