"""The quickstart as its reader walks it, with the real trainer: prepare, run with a preemption, load the adapter. Minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
LOADED = "print('layers', sum(1 for n, _ in pipe.transformer.named_modules() if n.endswith('lora_A')))"

pytestmark = pytest.mark.timeout(1200)


def python(*arguments: str, cwd: Path) -> str:
    """Output of a Python program, which must succeed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def size_of(path: Path) -> tuple[int, int]:
    """Width and height."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.size


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Folder and output of one run, shortened to 24 steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    for name in ("prepare.py", "job.yaml"):
        shutil.copy(QUICKSTART / name, folder)
    python("prepare.py", cwd=folder)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["spec"]["config"]["train"]["steps"] = 24
    job["spec"]["config"]["save"].update(save_every=4, max_step_saves=2)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    run = ("-m", "lora_operator", "run", "job.yaml", "--preempt-at", "6", "--write-status", "status.json")
    return folder, python(*run, cwd=folder)


def test_a_dozen_captioned_photographs_of_mixed_sizes_are_prepared(ended):
    photos = [path for path in (ended[0] / "build/photos").iterdir() if path.suffix in (".png", ".jpg")]
    assert len(photos) == 12
    assert all(path.with_suffix(".txt").read_text().strip() for path in photos)
    sizes = {size_of(path) for path in photos}
    assert len(sizes) > 8
    assert all(96 <= side <= 400 for size in sizes for side in size)


def test_the_run_is_preempted_once_loses_no_step_and_succeeds(ended):
    folder, output = ended
    status = json.loads((folder / "status.json").read_text())["status"]
    assert status["phase"] == "Succeeded"
    assert status["restarts"]["preemption"] == 1
    assert status["lostSteps"] == 0
    assert status["progress"]["step"] == 24
    assert status["checkpoints"]["count"] == 2
    assert "preempted on purpose" in output


def test_the_lines_it_prints_load_the_adapter(ended):
    folder, output = ended
    lines = [line.strip() for line in output.split("Load it with diffusers:\n")[1].splitlines()]
    shown = python("-c", "\n".join([*lines, LOADED]), cwd=folder)
    assert int(shown.rpartition("layers ")[2]) > 0


def test_samples_are_where_it_says(ended):
    folder, output = ended
    (line,) = [line for line in output.splitlines() if line.startswith("  samples ")]
    samples = [Path(name.strip()) for name in line.removeprefix("  samples ").split(",")]
    assert len(samples) == 2
    assert all(sample.is_file() for sample in samples), samples
    assert samples[0].is_relative_to(folder)
