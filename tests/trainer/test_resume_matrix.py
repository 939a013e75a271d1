"""Every family and every type of adapter: interrupted three times in a row where it hurts, the end is the same to the bit.

An iteration is never interrupted half-way: a signal is looked at between updates, and gradients that were accumulated when a
process vanishes are gone with it. So the places are: after the first step, just before a checkpoint, and just after one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from lora_api.exit_codes import ExitCode
from lora_trainer import checkpoint
from tests.trainer.clips import make_clip
from tests.trainer.jobs import Crash, Job, make_pictures, run_ranks
from tests.trainer.test_golden_losses import make_assistant

LORA = {"type": "lora", "linear": 2, "linear_alpha": 4, "dropout": 0.1}
CONV = {"conv": 2, "conv_alpha": 1}
TEXT = {"train_text_encoder": True, "text_encoder_lr": 5e-4}
FEW = {"only_if_contains": [".attentions."]}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "flux2_klein_4b": ("flux2_klein_4b", LORA, {}),
    "flux2_klein_4b lokr": ("flux2_klein_4b", {"type": "lokr"}, {}),
    "flux2_klein_9b": ("flux2_klein_9b", LORA, {}),
    "flux2_dev": ("flux2_dev", LORA, {}),
    "zimage": ("zimage", LORA, {}),
    "zimage dora": ("zimage", {"type": "dora", "linear": 2, "dropout": 0.1}, {}),
    "zimage loha": ("zimage", {"type": "loha", "linear": 2}, {}),
    "zimage lokr of low rank": ("zimage", {"type": "lokr", "linear": 2, "lokr_full_rank": False}, {}),
    "zimage full": ("zimage", {"type": "full", "ignore_if_contains": ["norm"]}, {}),
    "zimage:turbo": ("zimage:turbo", LORA, {}),
    "flux1": ("flux1", LORA, TEXT),
    "sd15": ("sd15", LORA | CONV, {}),
    "sd15 text encoder alone": ("sd15", LORA, TEXT | {"train_unet": False}),
    "sd15 dora": ("sd15", {"type": "dora", "linear": 2} | CONV, {}),
    "sd15 loha": ("sd15", {"type": "loha", "linear": 2} | CONV, {}),
    "sd15 lokr": ("sd15", {"type": "lokr", "linear": 2, "lokr_full_rank": False} | CONV, {}),
    "sd15 full": ("sd15", {"type": "full"}, {}),
    "sdxl": ("sdxl", LORA, TEXT),
    "qwen_image": ("qwen_image", LORA, {}),
    "wan21": ("wan21", LORA, {}),
    "wan21 full": ("wan21", {"type": "full"}, {}),
    "wan22": ("wan22", LORA, {}),
    "wan22 lokr": ("wan22", {"type": "lokr"}, {}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Pictures of two shapes, and a clip for the families that take it."""
    folder = make_pictures(tmp_path_factory.mktemp("data"), [(64, 64), (64, 64), (128, 64)])
    make_clip(folder / "clip.mkv", frames=5, size=(64, 64))
    (folder / "clip.txt").write_text("a clip")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache) -> Callable[..., Job]:
    def make(name: str, **train: Any) -> Job:
        arch, network, own = CASES[name]
        options = {"steps": 4, "gradient_accumulation": 2, "lr_scheduler": "cosine", "warmup_steps": 2, "lr": 3e-3}
        made = Job(tmp_path / "whole", tiny_model_folder(arch), data, cache, arch, train=options | own | train)
        made.config["network"] = dict(network)
        made.config["datasets"][0] |= {"caption_dropout": 0.3, "resolution": [128]}
        if arch.startswith("wan"):
            made.config["datasets"][0]["num_frames"] = 5
        if arch == "zimage:turbo":
            assistant = make_assistant(tmp_path / "assistant.safetensors")
            made.config["model"]["assistant_lora_path"] = str(assistant)
        return made.change(save={"save_every": 2})

    return make


def state_of(job: Job) -> dict[str, bytes]:
    """Adapter and optimizer of the newest checkpoint."""
    return {name: job.newest()[name] for name in (checkpoint.ADAPTER, checkpoint.OPTIMIZER)}


@dataclass(frozen=True)
class gone_before_saving:  # noqa: N801 - reads as what it does
    """A hook for `Job.run`: the process is gone after a step."""

    step: int

    def __call__(self, session: Any, now: int) -> None:
        if now == self.step:
            raise Crash


@pytest.mark.parametrize("name", CASES)
def test_three_interruptions_in_a_row_where_it_hurts_change_no_bit(name, job):
    whole = job(name)
    assert whole.run() == ExitCode.DONE, whole.word()
    broken = whole.copy("broken")
    assert broken.run(stop_after=1) == ExitCode.PREEMPTED
    assert broken.run(hook=gone_before_saving(2)) == 1
    assert broken.run(crash_after=2) == 1
    assert broken.run() == ExitCode.DONE
    assert broken.progress().start == 4
    assert state_of(broken) == state_of(whole)
    first, last = (load(files[checkpoint.ADAPTER]) for files in (checkpoint_at(whole, 2), whole.newest()))
    assert all(torch.isfinite(tensor).all() for tensor in last.values())
    assert any(not torch.equal(first[key], last[key]) for key in last), "something is trained"


def checkpoint_at(job: Job, step: int) -> dict[str, bytes]:
    from lora_api import layout

    folder = layout.checkpoint_folder(step, 1)
    return {checkpoint.ADAPTER: job.store.get(folder + checkpoint.ADAPTER) or b""}


@pytest.mark.parametrize("name", ["zimage", "sd15", "wan22"])
def test_a_finished_run_whose_steps_were_raised_ends_as_if_it_had_been_longer_from_the_start(name, job):
    constant = {"lr_scheduler": "constant"}  # other schedules are stretched over the new length
    whole = job(name, **constant)
    assert whole.run() == ExitCode.DONE
    longer = whole.copy("longer").change(train={"steps": 3})
    assert longer.run() == ExitCode.DONE
    longer.change(train={"steps": 4})
    longer.document = {"uid": "u2", "ifExists": "Continue"}
    assert longer.run() == ExitCode.DONE, longer.word()
    assert longer.progress().resumed_from_step == 3
    assert state_of(longer) == state_of(whole)


@pytest.mark.parametrize("name", ["zimage", "sdxl", "wan22", "zimage full"])
def test_two_ranks_go_on_as_if_never_interrupted_whichever_of_them_was_told_to_stop(name, job):
    whole = job(name, gradient_accumulation=1, steps=5)
    assert run_ranks(whole, [{}, {}]) == [ExitCode.DONE, ExitCode.DONE], whole.word()
    broken = whole.copy("broken")
    told = [{}, {"stop_after": 1}]  # ranks agree at the end of the next step
    assert run_ranks(broken, told) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    assert broken.word().step == 2
    assert run_ranks(broken, [{"hook": gone_before_saving(4)}] * 2) == [1, 1]
    assert run_ranks(broken, [{"crash_after": 4}] * 2) == [1, 1]
    assert run_ranks(broken, [{}, {}]) == [ExitCode.DONE, ExitCode.DONE], broken.word()
    assert state_of(broken) == state_of(whole)


def test_the_comparison_notices_samples_that_are_trained_twice(job, monkeypatch):
    from lora_trainer import session

    whole = job("zimage")
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(stop_after=1) == ExitCode.PREEMPTED
    original = session.unpack

    def behind(*arguments: Any) -> Any:
        state = original(*arguments)
        state.iteration -= 1
        return state

    monkeypatch.setattr(session, "unpack", behind)
    assert broken.run() == ExitCode.DONE
    assert state_of(broken) != state_of(whole)
