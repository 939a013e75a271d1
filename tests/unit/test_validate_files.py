"""`lora-operator validate`: what is read from files, what is said about it, and the examples of this repository."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lora_api.config import TrainerConfig
from lora_api.memory.estimate import Estimate
from lora_api.memory.words import estimate_lines
from lora_api.yamlfile import UnreadableError, read_documents
from lora_operator.cli import app
from lora_operator.local.validate import validate_files
from tests.local_runs import job_manifest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("**/*.yaml"))


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def to_file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return to_file


def test_there_are_examples():
    assert {"job.yaml", "klein-lokr.yaml", "zimage-lora.yaml", "two-nodes.yaml", "profile.yaml"} <= {
        path.name for path in EXAMPLES
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(example):
    report = validate_files([str(example)])
    assert report.problems == []
    assert report.checked == 1


def test_the_examples_fit_the_example_profile():
    assert validate_files([str(path) for path in EXAMPLES]).problems == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        ("1.5", 1.5),
        ("-.5", -0.5),
        ("0x1f", 31),
        ("12", 12),
        ("0", 0),
        ("v1e-4", "v1e-4"),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("'1e-4'", "1e-4"),
        ("true", True),
        ("512x512", "512x512"),
    ],
)
def test_scalars_are_read_as_kubernetes_reads_them(write, text, value):
    (document,) = read_documents(write("a.yaml", f"x: {text}\n"))
    assert document.value["x"] == value
    assert type(document.value["x"]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "a: 1\nb:\n  c: 1\n  c: 2\n",
            "a.yaml: line 4, column 3: the key 'c' is there twice (first in line 3)",
        ),
        ("a.yaml", "a: [1\nb: 2\n", "a.yaml: line 2, column 2"),
        ("a.yaml", "\ta: 1\n", "a.yaml: line 1, column 1"),
        ("a.json", '{"a": 1, "a": 2}', "a.json: the key 'a' is there twice"),
        ("a.json", '{"a": 1,}', "a.json: line 1, column 9"),
        ("a.yaml", "a: !!python/object:os.system 1\n", "a.yaml: line 1, column 4"),
    ],
)
def test_what_is_not_yaml_or_json_is_said_with_its_place(write, name, text, message):
    with pytest.raises(UnreadableError) as caught:
        read_documents(write(name, text))
    assert str(caught.value).startswith(message)


def test_a_missing_file_a_folder_and_binary_data_are_said(write, tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert validate_files(["nothere.yaml", str(tmp_path), "b.yaml"]).problems == [
        "nothere.yaml: can't be read: No such file or directory",
        f"{tmp_path}: can't be read: Is a directory",
        "b.yaml: is not UTF-8 text (byte 0)",
    ]


def test_a_merge_key_is_not_a_duplicate(write):
    text = "base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  a: 3\n"
    (document,) = read_documents(write("a.yaml", text))
    assert document.value["more"] == {"a": 3, "b": 2}


def test_each_problem_is_one_line_with_file_field_and_finding(write):
    name = write("job.yaml", json.dumps(job_manifest(save__max_step_saves=0, train__setps=3)))
    assert validate_files([name]).problems == [
        "job.yaml: spec.config.train.setps: unknown field; did you mean steps?",
        "job.yaml: spec.config.save.max_step_saves: 0 is below the minimum 1",
    ]


def test_documents_of_one_file_are_numbered(write):
    good, bad = json.dumps(job_manifest()), json.dumps(job_manifest(save__save_every=0))
    name = write("all.yaml", f"{good}\n---\n---\n{bad}\n---\n")
    assert validate_files([name]).problems == ["all.yaml#2: spec.config.save.save_every: 0 is below the minimum 1"]


def test_other_kinds_are_skipped_and_said_and_misspelt_ones_are_problems(write):
    name = write(
        "all.yaml",
        "apiVersion: v1\nkind: Secret\n---\napiVersion: lora-operator.io/v1alpha1\nkind: LoraTrainingJob\n---\n- a\n---\nspec: {}\n",
    )
    report = validate_files([name])
    assert report.notes == ["all.yaml#1: skipped, kind Secret is not ours"]
    assert report.problems == [
        "all.yaml#2: kind: 'LoraTrainingJob' is not one of LoRATrainingJob, LoRATrainingProfile; did you mean LoRATrainingJob?",
        "all.yaml#3: holds a list, expected a Kubernetes object with apiVersion, kind and spec",
        "all.yaml#4: kind: is missing; expected LoRATrainingJob or LoRATrainingProfile",
    ]


def test_a_profile_is_validated_and_its_stores_are_held_against_the_jobs(write):
    profile = {
        "apiVersion": "lora-operator.io/v1alpha1",
        "kind": "LoRATrainingProfile",
        "metadata": {"name": "default"},
        "spec": {"stores": [{"name": "fast", "type": "directory", "directory": "/x"}], "trainer": {"image": "t"}},
    }
    job = write("job.yaml", json.dumps(job_manifest()))
    good = write("profile.yaml", json.dumps(profile))
    (problem,) = validate_files([job, good]).problems
    assert problem.startswith("job.yaml: spec.output.store: 'default' is not a store of profile 'default'")
    del profile["spec"]["trainer"]
    assert validate_files([write("bad.yaml", json.dumps(profile))]).problems == [
        "bad.yaml: spec.trainer: is required, but missing"
    ]


def test_the_command_prints_problems_and_a_summary_and_exits_with_1(write):
    good = write("good.yaml", json.dumps(job_manifest()))
    bad = write("bad.yaml", json.dumps(job_manifest(save__save_every=0)))
    result = CliRunner().invoke(app, ["validate", good, bad])
    assert result.exit_code == 1
    assert result.stdout == "bad.yaml: spec.config.save.save_every: 0 is below the minimum 1\n"
    assert result.stderr == "2 manifests checked, 1 problem found\n"
    assert CliRunner().invoke(app, ["validate", good]).exit_code == 0


def test_the_command_reads_standard_input(tmp_path):
    result = CliRunner().invoke(app, ["validate", "-"], input=json.dumps(job_manifest(train__steps=0)))
    assert result.exit_code == 1
    assert result.stdout == "stdin: spec.config.train.steps: 0 is below the minimum 1\n"


def test_a_file_without_any_manifest_of_ours_does_not_pass(write):
    result = CliRunner().invoke(app, ["validate", write("empty.yaml", "# nothing\n")])
    assert result.exit_code == 1
    assert "nothing was checked" in result.stderr


# ---------------------------------------------------------------------- memory
def job_of(arch: str, **blocks) -> str:
    manifest = job_manifest()
    manifest["spec"]["config"] |= {"model": {"arch": arch, "name_or_path": "hf://org/model"}} | blocks
    return json.dumps(manifest)


def test_the_memory_of_a_valid_job_is_told_as_a_table(write):
    write("job.yaml", job_of("zimage", train={"dtype": "bf16"}))
    result = CliRunner().invoke(app, ["validate", "job.yaml"])
    assert result.exit_code == 0
    assert "job.yaml: memory of each process: about " in result.stderr
    for row in ("weights", "adapter", "gradients", "optimizer", "activations", "training", "caching"):
        assert f"\n  {row} " in result.stderr
    assert "Tongyi-MAI/Z-Image" in result.stderr
    assert "warning" not in result.stderr
    assert result.stdout == ""


def test_the_memory_of_a_tiny_model_is_told_in_a_unit_that_shows_it(write):
    config = TrainerConfig.model_validate(job_manifest()["spec"]["config"])
    small = Estimate(3 << 20, 1 << 19, 0, 0, 0, 0, 0, 0, source="a test")
    lines = estimate_lines(config, small)
    assert lines[0] == "memory of each process: about 3.5 MiB (+- 0.0), from a test"
    assert lines[1].split()[:3] == ["weights", "3.00", "MiB"]
    large = estimate_lines(config, replace(small, weights=3 << 30))
    assert large[1].split()[:3] == ["weights", "3.00", "GiB"]


def test_a_gpu_that_is_too_small_is_warned_of_with_what_helps(write):
    write("job.yaml", job_of("zimage", train={"dtype": "fp32", "batch_size": 8}))
    result = CliRunner().invoke(app, ["validate", "--gpu-memory", "16", "job.yaml"])
    assert result.exit_code == 0
    assert "warning: about " in result.stderr
    assert "the GPU has 16.0" in result.stderr
    assert "train.gradient_checkpointing: true; train.dtype: bf16" in result.stderr
    fits = CliRunner().invoke(app, ["validate", "--gpu-memory", "500", "job.yaml"])
    assert "warning" not in fits.stderr


def test_no_memory_is_told_of_what_is_wrong_or_not_known(write):
    write("bad.yaml", job_of("zimage", train={"steps": 0}))
    write("own.yaml", job_of("x-mine"))
    write("profile.yaml", "kind: Secret\napiVersion: v1\n")
    report = validate_files(["bad.yaml", "own.yaml", "profile.yaml"])
    assert report.memory == []
