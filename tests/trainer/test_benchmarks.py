"""The benchmarks run: what they measure moves on, and they would be found broken when their figures are needed."""

from __future__ import annotations

import json
import math
import sys

import pytest

from tests.trainer.jobs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import save_stall
import trainer_loop


def test_the_loop_is_measured_against_its_floor(monkeypatch, capsys):
    monkeypatch.setitem(trainer_loop.PAIRS, "1M", (1, 1))
    ours, bare = trainer_loop.measure("1M")
    assert ours > 0
    assert bare > 0
    assert "ratio median" in capsys.readouterr().out


def test_the_stall_of_a_save_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(save_stall, "SIZE", "1M")
    monkeypatch.setattr(sys, "argv", ["save_stall.py", "--pairs", "1", "--steps", "2"])
    save_stall.main()
    assert "in the background: the loop stands still for" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["tiny-klein", "tiny-z-image"])
def test_the_script_for_gpus_runs_on_tiny_shapes(shape, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "WARM_STEPS", 1)
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shapes", shape, "--steps", "1", "--no-compile", "--out", str(out)])
    gpu.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows] == [each.name for each in gpu.VARIANTS if not each.compile]
    assert all(0 < row["utilisation"] < 2 and math.isfinite(row["seconds_per_step"]) for row in rows)


@pytest.mark.parametrize(("name", "parameters"), [("klein-4b", 3_875_544_576), ("z-image", 6_154_908_736)])
def test_the_shapes_for_gpus_are_those_of_the_released_models(name, parameters, load_tiny):
    import torch

    shape = gpu.SHAPES[name]
    tiny = load_tiny(shape.arch, torch.float32).denoiser
    with torch.device("meta"):
        made = type(tiny)(**{k: v for k, v in dict(tiny.config).items() if not k.startswith("_")} | shape.config)
    assert sum(parameter.numel() for parameter in made.parameters()) == parameters
