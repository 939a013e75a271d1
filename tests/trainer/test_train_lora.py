"""`train_lora.py` from flags to adapter: one real training on a tiny model, stopped and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from lora_api.stores import DirectoryStore
from tests.trainer.jobs import ROOT, await_true, make_pictures


@pytest.fixture
def flags(tmp_path, tiny_model_folder):
    given = {
        "base_model": tiny_model_folder("zimage"),
        "train_data": make_pictures(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "resolution": 64,
        "batch_size": 2,
        "learning_rate": "1e-3",
        "rank": 2,
        "save_every": 2,
        "max_step_saves": 2,
        "mixed_precision": "no",
        "device": "cpu",
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """The environment of the run; what the command line adds to it is taken back."""
    for name, value in (("LORA_CACHE_DIR", str(tmp_path / "cache")), ("LORA_HEARTBEAT_SECONDS", "0.1")):
        monkeypatch.setenv(name, value)
    for name in ("LORA_RUN_CONFIG", "LORA_RETENTION", "LORA_COMMAND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def steps_kept(store):
    keys = [item.key for item in store.list("checkpoints/") if item.key.endswith("manifest.json")]
    manifests = [store.get(key) for key in keys]  # one may be removed while we look
    return sorted(json.loads(manifest)["step"] for manifest in manifests if manifest)


def train_here(arguments):
    from lora_trainer.cli import train_file
    from lora_trainer.commandline.command import prepare

    return train_file(prepare(arguments, "python train_lora.py"))


def test_a_run_is_interrupted_with_ctrl_c_gone_on_with_finished_and_made_longer(
    flags, tmp_path, variables, capfd, caplog
):
    store = DirectoryStore(tmp_path / "out")
    program = [sys.executable, str(ROOT / "train_lora.py"), *flags, "--steps", "100000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(program, env=variables, stderr=log, cwd=tmp_path)
    await_true(lambda: steps_kept(store)[-1:] >= [6], "a third checkpoint")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 85
    said = (tmp_path / "log").read_text()
    assert "arch zimage, seen from" in said
    assert "Go on with: python train_lora.py --base_model" in said
    stopped = steps_kept(store)[-1]

    caplog.set_level("INFO")
    assert train_here([*flags, "--steps", str(stopped + 2)]) == 0
    assert f"checkpoints/step-{stopped:09d}" in caplog.text
    assert f"adapter  {tmp_path}/out/final/adapter.safetensors" in capfd.readouterr().err
    assert (tmp_path / "out" / "final" / "adapter.safetensors").is_file()
    assert len(steps_kept(store)) == 2
    assert steps_kept(store)[-1] == stopped + 2

    assert train_here([*flags, "--steps", str(stopped + 3)]) == 0
    assert f"the run was finished at step {stopped + 2}; going on to step {stopped + 3}" in caplog.text
    assert json.loads(store.get("final/manifest.json"))["step"] == stopped + 3
