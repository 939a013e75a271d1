"""What lies beside a result, after a run that was interrupted."""

from __future__ import annotations

import io
import json

import pytest
import yaml
from PIL import Image
from safetensors import safe_open

from lora_api import layout
from lora_api.exit_codes import ExitCode
from tests.trainer.jobs import Job, make_pictures


@pytest.fixture(scope="module")
def done(tmp_path_factory, tiny_model_folder):
    folder = tmp_path_factory.mktemp("records")
    job = Job(
        folder / "job", tiny_model_folder("zimage"), make_pictures(folder / "data"), folder / "cache",
        trigger_word="sks", train={"steps": 8},
        sample={"prompts": ["a [trigger]"], "width": 32, "height": 32, "sample_steps": 1, "sample_every": 2, "seed": 7},
    )  # fmt: skip
    assert job.run(crash_after=5) == 1
    assert job.run() == ExitCode.DONE
    return job


def test_the_report_is_part_of_the_result_and_shows_both_starts(done):
    final = json.loads(done.store.get(layout.FINAL_MANIFEST))
    assert {"config.json", "metadata.yaml", "report.html"} <= {file["name"] for file in final["files"]}
    html = done.store.get(layout.FINAL + "report.html").decode()
    assert "start 2 went on from step 3" in html
    assert "2 steps were made twice" in html
    for title in ("step 2", "step 4", "step 6", "result"):
        assert f'alt="a sks, {title}"' in html
    assert "memory at the peak, GiB" in html


def test_the_metadata_says_what_the_adapter_was_made_from(done):
    facts = yaml.safe_load(done.store.get(layout.FINAL + "metadata.yaml"))
    assert facts["dataset"]["files"] == 5
    assert sum(facts["dataset"]["buckets"].values()) == facts["samples"]
    assert facts["config"]["train"]["steps"] == 8
    training = facts["training"]
    assert (training["starts"], training["lost_steps"]) == (2, 2)
    assert training["seconds_per_step"] > 0
    assert facts["memory_gib"]["measured_peak"] >= 0, "what this process grew by; earlier tests may have taken more"
    assert facts["memory_gib"]["measured_on"] == "cpu"
    assert facts["memory_gib"]["total"] > 0
    assert (facts["device"], facts["dtype"]) == ("cpu", "fp32")


def test_the_adapter_s_header_holds_its_configuration_and_its_data(done, tmp_path):
    file = tmp_path / "adapter.safetensors"
    assert done.store.fetch(layout.FINAL + "adapter.safetensors", file)
    with safe_open(file, "pt") as reader:
        header = reader.metadata()
    assert json.loads(header["config"])["trigger_word"] == "sks"
    buckets = json.loads(header["ss_bucket_info"])["buckets"]
    assert sum(each["count"] for each in buckets.values()) == int(header["ss_num_train_images"])
    assert header["modelspec.usage_hint"] == "Write sks into the prompt."
    assert header["ss_training_finished_at"] == header["completed_at"] == header["modelspec.date"]


def test_a_sample_in_the_run_directory_says_what_it_was_drawn_of(done):
    with Image.open(io.BytesIO(done.store.get(layout.samples_folder(4) + "00.png"))) as picture:
        assert {name: picture.info[name] for name in ("prompt", "seed", "step")} == {
            "prompt": "a sks", "seed": "7", "step": "4",
        }  # fmt: skip


def test_a_report_that_can_not_be_made_costs_nothing_else(done, monkeypatch, caplog):
    from lora_trainer import records

    def broken(report):
        raise KeyError("training")

    monkeypatch.setattr(records, "page", broken)
    other = done.copy("other").change(train={"steps": 1}, sample={"prompts": []})
    assert other.run() == ExitCode.DONE
    names = {item.key for item in other.store.list(layout.FINAL)}
    assert layout.FINAL + "report.html" not in names
    assert {layout.FINAL + "adapter.safetensors", layout.FINAL + "metadata.yaml", layout.FINAL_MANIFEST} <= names
    assert "no report was written" in caplog.text
