"""The operator as it is shipped: its own requirements, the wheel, and no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.bad_manifests import JOB, PROFILE, changed

ROOT = Path(__file__).resolve().parents[2]
TRAINING_ONLY = ["torch", "diffusers", "transformers", "peft", "safetensors", "torchvision", "accelerate"]

IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
import lora_api, lora_operator
for package in (lora_api, lora_operator):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
assert not found, found
print(len([name for name in sys.modules if name.startswith("lora_")]))
"""


def run(*command, check=True, **more):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment, **more)
    assert not check or done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done


def uv():
    beside = Path(sys.prefix) / "bin" / "uv"
    found = beside if beside.exists() else shutil.which("uv")
    assert found, "uv not found; `make` installs it from requirements/bootstrap.txt"
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(uv(), "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, cwd=ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with what the operator's image has in it; returns its folder of programs."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(uv(), "venv", "--python", sys.executable, venv)
    python = venv / "bin" / "python"
    run(uv(), "pip", "install", "--python", python, "--require-hashes", "-r", ROOT / "requirements" / "operator.txt")
    run(uv(), "pip", "install", "--python", python, "--no-deps", wheel)
    return python.parent


def test_every_module_of_the_operator_imports_without_torch(installed):
    done = run(installed / "python", "-c", IMPORT_ALL, *TRAINING_ONLY, cwd=installed)
    assert int(done.stdout) > 20


def test_the_requirements_satisfy_each_other(installed):
    run(uv(), "pip", "check", "--python", installed / "python")


def test_a_good_manifest_is_valid_and_a_bad_one_is_told_why(installed, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(json.dumps(JOB))
    bad.write_text(json.dumps(changed(JOB, "spec.config.save.max_step_saves", 0)))
    run(installed / "lora-operator", "validate", good)
    done = run(installed / "lora-operator", "validate", bad, check=False)
    assert done.returncode != 0
    assert "spec.config.save.max_step_saves: 0 is below the minimum 1" in done.stdout + done.stderr


def test_help_is_quick_to_say_what_there_is(installed):
    assert "validate" in run(installed / "lora-operator", "--help").stdout


def test_the_standard_library_is_not_shadowed(installed):
    done = run(
        installed / "python", "-c", "import operator; print(operator.__file__, operator.add(1, 1))", cwd=ROOT.parent
    )
    assert done.stdout.split()[-1] == "2"
    assert "site-packages" not in done.stdout


def test_the_wheel_has_the_code_of_three_packages_and_its_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lora_api", "lora_operator", "lora_trainer"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_a_profile_is_valid_too(installed, tmp_path):
    profile = tmp_path / "profile.yaml"
    profile.write_text(json.dumps(PROFILE))
    run(installed / "lora-operator", "validate", profile)
