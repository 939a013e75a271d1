"""Whole runs of FLUX.1, Stable Diffusion 1.5 and SDXL: one line changes the family, and no interruption changes a bit."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_trainer import checkpoint
from lora_trainer.control import ControlWatch, read_control
from lora_trainer.runtime import Group
from tests.trainer.classic import CLASSIC, draw, fresh_pipeline
from tests.trainer.jobs import Job, make_pictures

SIZES = [(64, 64), (64, 64), (128, 64)]
TEXT = {"train_text_encoder": True, "unet_lr": 2e-3, "text_encoder_lr": 5e-4}


@pytest.fixture
def job(tmp_path, tiny_model_folder):
    def make(arch: str, **train) -> Job:
        data = make_pictures(tmp_path / "data", SIZES)
        options = {"steps": 4, "gradient_accumulation": 2, "lr_scheduler": "cosine", "warmup_steps": 1} | train
        made = Job(tmp_path / "whole", tiny_model_folder(arch), data, tmp_path / "cache", arch, train=options)
        made.config["network"] = {"type": "lora", "linear": 2, "linear_alpha": 4, "dropout": 0.1, "conv": 1}
        made.config["datasets"][0]["caption_dropout"] = 0.3
        made.config["save"]["save_every"] = 2
        return made

    return make


def same_training(one: Job, other: Job) -> bool:
    first, second = one.newest(), other.newest()
    return all(first[name] == second[name] for name in (checkpoint.ADAPTER, checkpoint.OPTIMIZER))


@pytest.mark.parametrize(("arch", "train"), [("sd15", TEXT), ("sdxl", {}), ("flux1", TEXT | {"train_unet": False})])
def test_one_line_chooses_the_family_and_interruptions_change_no_bit(job, arch, train, tiny_model_folder):
    whole = job(arch, **train)
    assert whole.run() == ExitCode.DONE, whole.word()
    broken = whole.copy("broken")
    assert broken.run(crash_after=3) == 1
    assert broken.run(stop_after=3) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)
    from safetensors.torch import load

    final = load(whole.store.get(layout.FINAL + "adapter.safetensors"))
    prefixes = {key.partition(".")[0] for key in final}
    assert prefixes == {"sd15": {"unet", "text_encoder"}, "sdxl": {"unet"}, "flux1": {"text_encoder"}}[arch]
    assert all(final[key].abs().max() > 0 for key in final if ".lora_B." in key), "every layer has moved"


def test_samples_are_drawn_with_the_text_encoder_as_it_was_trained(job, tiny_model_folder):
    from lora_trainer.export import load_into_pipeline

    trained = job("sd15", train_text_encoder=True, train_unet=False, lr=3e-2, warmup_steps=0)
    trained.change(
        sample={"prompts": ["a red cube"], "width": 64, "height": 64, "sample_steps": 2, "guidance_scale": 0}
    )
    seen = []
    from lora_trainer import finalize

    original = finalize.draw_samples

    def record(model, conditions, negative, folder, **options):
        seen.append(conditions[0]["embeds"])
        return original(model, conditions, negative, folder, **options)

    with patch.object(finalize, "draw_samples", record):
        assert trained.run() == ExitCode.DONE, trained.word()
    pipe = fresh_pipeline(tiny_model_folder("sd15"))
    base = pipe.encode_prompt("a red cube", "cpu", 1, False)[0]
    load_into_pipeline(pipe, trained.folder / "run" / "final" / "adapter.safetensors")
    own = pipe.encode_prompt("a red cube", "cpu", 1, False)[0]
    assert torch.allclose(seen[-1][None], own, atol=1e-5)
    assert (own - base).abs().max() > 1e-2
    assert torch.isfinite(draw(pipe, prompt="a red cube")).all()


def test_a_new_rate_scales_both_groups_now_and_after_a_restart(job, monkeypatch):
    def read_now(watch, generation):
        found = read_control(watch._store)
        return found if found is not None and found.generation > generation else None

    rates = []

    def change(session, step):
        rates.append([round(group["lr"], 9) for group in session.optimizer.param_groups])
        if step == 2:
            control = {"generation": 2, "steps": 6, "lr": 5e-4, "saveEvery": 2, "maxStepSaves": 2}
            session.store.put(layout.CONTROL, json.dumps(control).encode())

    monkeypatch.setattr(ControlWatch, "newer_than", read_now)
    broken = job("sd15", steps=6, lr=1e-3, lr_scheduler="constant", warmup_steps=0, **TEXT)
    assert broken.run(hook=change, crash_after=5) == 1
    broken.change(train={"lr": 5e-4})  # the operator hands the changed configuration to the next start
    assert broken.run(hook=change) == ExitCode.DONE
    first, later = [2e-3, 5e-4], [1e-3, 2.5e-4]
    assert rates == [first] * 3 + [later] * 2 + [later] * 2  # taken over after step 3; from checkpoint 4 on again
    assert json.loads(broken.newest()[checkpoint.STATE])["lr_scales"] == [2.0, 0.5]


def test_a_family_that_can_not_train_its_text_encoder_is_refused_before_anything_is_written(job):
    refused = job("sd15", train_text_encoder=True)
    refused.config["model"]["arch"] = "zimage"
    with pytest.raises(ValueError, match=r"train_text_encoder: true is not supported for model\.arch zimage"):
        refused.write()


def test_gradients_outside_of_wrapped_modules_are_averaged_over_ranks(monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.mul_(3.0).add_(1.0))
    gradients = [torch.ones(2, 2), torch.tensor([2.0])]
    Group(0, 2, torch.device("cpu")).average(gradients)
    assert torch.equal(gradients[0], torch.full((2, 2), 2.0))
    assert torch.equal(gradients[1], torch.tensor([3.5]))


@pytest.mark.parametrize("arch", CLASSIC)
def test_half_precision_trains_and_draws(arch, job):
    half = job(arch, train_text_encoder=True, steps=2, dtype="bf16")
    half.change(sample={"prompts": ["a red cube"], "width": 64, "height": 64, "sample_steps": 1})
    assert half.run() == ExitCode.DONE, half.word()
