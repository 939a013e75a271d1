"""The command line: what it offers, and that it stays quick and quiet."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lora_operator.cli import app
from tests.local_runs import job_manifest


def call(*arguments, **more):
    return CliRunner().invoke(app, list(arguments), **more)


def test_help_lists_every_command_with_a_sentence():
    result = call("--help")
    assert result.exit_code == 0
    for command in ("run", "validate", "status", "logs", "serve", "version"):
        assert f"  {command} " in result.stdout


@pytest.mark.parametrize("command", ["run", "validate", "status", "logs"])
def test_every_command_explains_itself(command):
    assert call(command, "--help").exit_code == 0


def test_the_version_is_the_distributions():
    assert call("version").stdout.strip().count(".") == 2


def test_neither_the_program_nor_a_run_imports_torch_or_the_cluster_client():
    script = (
        "import sys, lora_operator.cli; light = set(sys.modules); import lora_operator.local.run;"
        "print([m for m in ('pydantic', 'yaml', 'rich.live') if m in light]);"
        "print([m for m in ('torch', 'diffusers', 'kubernetes', 'kopf', 'lora_trainer') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]


def test_a_problem_of_the_users_is_a_sentence_and_exit_code_1_not_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("run", "nothere.yaml")
    assert (result.exit_code, result.stderr) == (1, "nothere.yaml: can't be read: No such file or directory\n")


def test_a_store_that_can_not_be_made_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "job.yaml").write_text(json.dumps(job_manifest()))
    (tmp_path / "file").touch()
    result = call("run", "job.yaml", "--store", "file/runs")
    assert result.exit_code == 1
    assert result.stderr == f"{tmp_path}/file/runs/.lora-operator/default/stub: can't be written: Not a directory\n"


@pytest.mark.parametrize(("command", "words"), [("status", "has not been run here"), ("logs", "has no log here")])
def test_a_job_that_was_never_run_has_neither_status_nor_log(tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(job_manifest()))
    result = call(command, "job.yaml")
    assert result.exit_code == 1
    assert words in result.stderr
