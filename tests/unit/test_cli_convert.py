"""`lora-operator convert`: manifests from ai-toolkit files, checked against golden ones for the presets of its UI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lora_operator.cli import app
from lora_operator.local.convert import name_from
from tests.unit.test_aitoolkit import PRESETS, preset, put

GOLDEN = PRESETS / "golden"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"


def call(*arguments, **more):
    return CliRunner().invoke(app, list(arguments), **more)


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_gives_its_golden_manifest_or_its_golden_refusal(file, monkeypatch):
    monkeypatch.chdir(PRESETS)
    result = call("convert", file.name)
    golden = GOLDEN / (f"{file.stem}.yaml" if result.exit_code == 0 else f"{file.stem}.txt")
    if UPDATE:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(result.stdout or result.stderr)
    assert (result.stdout or result.stderr) == golden.read_text()


def test_what_is_converted_is_valid(monkeypatch):
    monkeypatch.chdir(PRESETS)
    manifest = call("convert", "klein-4b.yaml").stdout
    result = call("validate", "-", input=manifest)
    assert result.exit_code == 0
    assert "memory on each GPU: about " in result.stderr
    assert result.stderr.endswith("1 manifest checked, no problem found\n")


def test_name_and_store_are_the_users(monkeypatch):
    monkeypatch.chdir(PRESETS)
    manifest = yaml.safe_load(call("convert", "klein-4b.yaml", "--name", "mascot", "--store", "shared").stdout)
    assert manifest["metadata"] == {"name": "mascot"}
    assert manifest["spec"]["output"] == {"store": "shared"}


def test_a_name_is_made_legal():
    assert name_from("My first LoRA_v1!") == "my-first-lora-v1"
    assert name_from("___") == "lora"
    assert len(name_from("x" * 200)) == 63


def test_a_name_that_is_not_legal_is_refused(monkeypatch):
    monkeypatch.chdir(PRESETS)
    result = call("convert", "klein-4b.yaml", "--name", "My_LoRA")
    assert result.exit_code == 1
    assert "metadata.name: 'My_LoRA' is not a legal name" in result.stderr


def test_a_value_out_of_range_is_told_at_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(yaml.safe_dump(put(preset(), "train.lr", -1)))
    result = call("convert", "bad.yaml")
    assert result.stderr == "bad.yaml: config.process[0].train.lr: -1 is too small; expected a value above 0\n"


def test_a_manifest_is_not_converted_again(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2] / "examples")
    result = call("convert", "zimage-lora.yaml")
    assert result.exit_code == 1
    assert "it is a manifest (LoRATrainingJob) already" in result.stderr


def test_validate_takes_an_ai_toolkit_file_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(yaml.safe_dump(preset()))
    Path("bad.yaml").write_text(yaml.safe_dump(put(preset(), "train.step", 1)))
    result = call("validate", "good.yaml", "bad.yaml")
    assert result.exit_code == 1
    assert "good.yaml: is an ai-toolkit file; `lora-operator convert` writes it as a manifest" in result.stderr
    assert result.stdout == "bad.yaml: config.process[0].train.step: unknown key; did you mean steps?\n"


def test_run_takes_an_ai_toolkit_file_as_it_is_with_folders_relative_to_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = put(put(preset(), "model.name_or_path", "model"), "datasets.0.folder_path", "nothere")
    Path("model").mkdir()
    Path("config").mkdir()
    Path("config/klein.yaml").write_text(yaml.safe_dump(raw))
    result = call("run", "config/klein.yaml")
    assert result.exit_code == 1
    assert f"spec.config.datasets[0].folder_path: the folder {tmp_path}/nothere does not exist" in result.stderr
    assert "name_or_path" not in result.stderr


def test_status_finds_the_run_of_an_ai_toolkit_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("klein.yaml").write_text(yaml.safe_dump(preset()))
    assert "default/my-first-lora-v1 has not been run here" in call("status", "klein.yaml").stderr
