"""Everything that has a memory, in one run: interrupted three times in a row, the end is the same to the bit."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import yaml

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_trainer.export import load_into_pipeline
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.test_export import fresh_pipeline
from tests.trainer.test_resume_matrix import gone_before_saving


@pytest.fixture
def job(tmp_path, tiny_model_folder) -> Job:
    """Stages, averaged weights, two datasets whose weights change, restarts of the rate, dropout of both kinds."""
    old = make_pictures(tmp_path / "old", [(64, 64)] * 3)
    new = make_pictures(tmp_path / "new", [(64, 64), (96, 64), (64, 64)])
    made = Job(tmp_path / "whole", tiny_model_folder("zimage"), old, tmp_path / "cache", "zimage")
    made.config["datasets"] = [
        {
            "folder_path": str(old),
            "resolution": [64],
            "weight": [{"at_step": 0, "value": 3}, {"at_step": 6, "value": 1}],
        },
        {"folder_path": str(new), "resolution": [64], "caption_dropout": 0.3, "weight": [{"at_step": 0, "value": 1}]},
    ]
    made.config["network"] = {"type": "lora", "linear": 2, "dropout": 0.1}
    made.config["train"] = {
        "dtype": "fp32", "lr": 3e-3, "steps": 10, "lr_scheduler": "cosine_with_restarts",
        "lr_scheduler_params": {"num_cycles": 3},
        "ema_config": {"use_ema": True, "ema_decay": 0.9},
        "stages": [{"steps": 4, "batch_size": 2}, {"steps": 6, "gradient_accumulation": 2, "caption_dropout": 0.5}],
    }  # fmt: skip
    made.config["save"] = {"save_every": 4, "dtype": "fp32"}
    return made


def last_files(job: Job) -> dict[str, bytes]:
    """All tensors of the newest checkpoint."""
    return {name: content for name, content in job.newest().items() if name.endswith(".safetensors")}


def test_three_interruptions_of_a_run_that_does_everything_at_once_change_no_bit(job):
    whole = job
    assert whole.run() == ExitCode.DONE, whole.word()
    broken = whole.copy("broken")
    assert broken.run(stop_after=3) == ExitCode.PREEMPTED  # the last step but one of the first stage
    assert broken.run(hook=gone_before_saving(5)) == 1  # the first step of the second stage is done
    assert broken.run(stop_after=7) == ExitCode.PREEMPTED  # after the weights have changed
    assert broken.run() == ExitCode.DONE
    assert last_files(whole).keys() == last_files(broken).keys()
    assert last_files(whole) == last_files(broken)
    tails = [store.get(layout.FINAL + "adapter.safetensors")[-2000:] for store in (whole.store, broken.store)]
    assert tails[0] == tails[1]


@pytest.mark.parametrize("without", ["ema_config", "stages", "lr_scheduler", "weight"])
def test_each_of_the_parts_has_an_effect_on_that_run(job, without):
    whole, other = job, job.copy("other")
    assert whole.run() == ExitCode.DONE
    if without == "weight":
        del other.config["datasets"][0]["weight"][1:]
    else:
        del other.config["train"][without]
        if without == "lr_scheduler":
            del other.config["train"]["lr_scheduler_params"]
    assert other.run() == ExitCode.DONE, other.word()
    tails = [store.get(layout.FINAL + "adapter.safetensors")[-2000:] for store in (whole.store, other.store)]
    assert tails[0] != tails[1]


MANIFEST = """
device: cpu
model: {arch: zimage, name_or_path: MODELS/zimage}
network: {type: lora, linear: 2}
datasets:
  - {folder_path: DATA, resolution: [64]}
train: {steps: 2, dtype: fp32}
save: {dtype: fp32}
"""


def test_one_line_of_a_manifest_changes_z_image_into_klein_and_back(tiny_model_folder, tmp_path):
    data = make_pictures(tmp_path / "data", [(64, 64)])
    models = tiny_model_folder("zimage").parent
    tiny_model_folder("flux2_klein_4b")
    zimage = MANIFEST.replace("MODELS", str(models)).replace("DATA", str(data))
    klein = zimage.replace("arch: zimage", "arch: flux2_klein_4b").replace("/zimage}", "/flux2_klein_4b}")
    changed = [line for line in difflib.ndiff(zimage.splitlines(), klein.splitlines()) if line[0] in "+-"]
    assert len(changed) == 2, "one line out, one line in"
    for arch, manifest in (("zimage", zimage), ("flux2_klein_4b", klein)):
        job = Job(tmp_path / arch, Path("unused"), data, tmp_path / "cache", arch)
        job.config = yaml.safe_load(manifest)
        assert job.run() == ExitCode.DONE, job.word()
        file = job.folder / "run" / layout.FINAL / "adapter.safetensors"
        assert load_into_pipeline(fresh_pipeline(models / arch), file) > 0
