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
def command(tmp_path, tiny_model_folder):
    data = make_pictures(tmp_path / "data")
    flags = {
        "base_model": tiny_model_folder("zimage"),
        "train_data": data,
        "output_dir": tmp_path / "out",
        "resolution": 64,
        "batch_size": 2,
        "num_epochs": 4,
        "learning_rate": "1e-3",
        "rank": 2,
        "save_every": 2,
        "max_step_saves": 2,
        "mixed_precision": "no",
        "device": "cpu",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train_lora.py"), *words]


def environment(tmp_path):
    ours = {"LORA_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "LORA_HEARTBEAT_SECONDS": "0.1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ours


def steps_kept(store):
    keys = [item.key for item in store.list("checkpoints/") if item.key.endswith("manifest.json")]
    return sorted(json.loads(store.get(key) or b"")["step"] for key in keys)


def finish(command, tmp_path):
    return subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=240)


def test_flags_train_an_adapter_that_ctrl_c_interrupts_and_the_same_command_finishes(command, tmp_path):
    store = DirectoryStore(tmp_path / "out")
    slow = [*command[:-2], "--device", "cpu", "--set", "train.steps=100000"]
    slow = [word for word in slow if word not in ("--num_epochs", "4")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(slow, env=environment(tmp_path), stderr=log, cwd=tmp_path)
    await_true(lambda: len(steps_kept(store)) == 2 and 6 in steps_kept(store), "a third checkpoint")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 85
    said = (tmp_path / "log").read_text()
    assert "arch zimage, seen from" in said
    assert "Go on with: python train_lora.py --base_model" in said
    stopped = steps_kept(store)[-1]

    ended = finish([*slow[:-1], f"train.steps={stopped + 4}"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"checkpoints/step-{stopped:09d}" in ended.stderr
    assert f"adapter  {tmp_path}/out/final/adapter.safetensors" in ended.stderr
    assert (tmp_path / "out" / "final" / "adapter.safetensors").is_file()
    assert len(steps_kept(store)) == 2
    assert steps_kept(store)[-1] == stopped + 4
