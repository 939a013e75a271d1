"""The example family of the documentation, installed as another package would be, trains to its end."""

from __future__ import annotations

import importlib
import sys
import tomllib
from importlib import metadata

import numpy as np
import pytest
import torch

from lora_api import layout
from lora_api.archs import Arch
from lora_api.exit_codes import ExitCode
from lora_trainer.export import load_into_pipeline
from lora_trainer.families import Family, family_for, known_archs
from tests.trainer.classic import fresh_pipeline
from tests.trainer.jobs import ROOT, Job, make_pictures

EXAMPLE = ROOT / "examples" / "custom-family"
CPU = torch.device("cpu")


def make_auraflow(folder):
    """A tiny AuraFlow, of parts that the package makes for its own tiny models."""
    from diffusers import (
        AuraFlowPipeline,
        AuraFlowTransformer2DModel,
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
    )
    from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

    from lora_trainer.tiny.tokenizer import build_t5_tokenizer
    from lora_trainer.tiny.vae import build_vae

    torch.manual_seed(0)
    tokenizer = build_t5_tokenizer()
    assert isinstance(tokenizer, T5Tokenizer)
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    ).eval()
    transformer = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64,
        pos_embed_max_size=64,
    )  # fmt: skip
    pipe = AuraFlowPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=build_vae(AutoencoderKL, channels=4), transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example on the path with the metadata that an installation leaves."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    [(group, points)] = project["entry-points"].items()
    info = tmp_path / "site" / "aura_family-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    for folder in (EXAMPLE, info.parent):
        monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("aura_family", None)


def test_it_trains_draws_and_ends_with_an_adapter_that_the_pipeline_loads(installed, tmp_path):
    assert "x-auraflow" in known_archs()
    model = make_auraflow(tmp_path / "model")
    data = make_pictures(tmp_path / "data", [(64, 64)] * 2)
    sample = {"prompts": ["a red cube"], "width": 32, "height": 32, "sample_steps": 2}
    job = Job(tmp_path / "job", model, data, tmp_path / "cache", "x-auraflow", train={"steps": 3}, sample=sample)
    assert job.run() == ExitCode.DONE, job.word()
    assert job.store.get(layout.FINAL + "sample-00.png")
    assert load_into_pipeline(fresh_pipeline(model), tmp_path / "job" / "run" / "final" / "adapter.safetensors") > 0


def test_its_pictures_are_those_of_the_pipeline(installed, tmp_path):
    folder = make_auraflow(tmp_path / "model")
    model = family_for("x-auraflow").load(folder, dtype=torch.float32, device=CPU)
    options = {"width": 64, "height": 64, "guidance_scale": 3.0}
    ours = model.sample(model.encode_text("a cat"), model.encode_text(""), **options, steps=2, seed=1)
    theirs = fresh_pipeline(folder)(
        prompt="a cat", num_inference_steps=2, generator=torch.Generator().manual_seed(1),
        max_sequence_length=model.text_tokens, **options,
    ).images[0]  # fmt: skip
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


def test_a_family_that_is_not_installed_is_refused_by_name(tmp_path):
    job = Job(tmp_path / "job", tmp_path, tmp_path, tmp_path / "cache", "x-auraflow")
    assert job.run() == ExitCode.CONFIGURATION
    assert "config.model.arch: found 'x-auraflow', expected one of flux1" in job.word().message


# ---------------------------------------------------------------------- finding it
class ThirdParty(Family):
    """A family of somebody else."""

    arch = ("x-third-party",)

    def load(self, folder, *, dtype, device):
        raise NotImplementedError


def pretend_entry_point(monkeypatch, value: str) -> None:
    point = metadata.EntryPoint("theirs", value, "lora_trainer.families")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "lora_trainer.families" else [])


def test_a_family_of_another_package_is_found_through_its_entry_point(monkeypatch):
    monkeypatch.setitem(sys.modules, "theirs", type("module", (), {"ThirdParty": ThirdParty}))
    pretend_entry_point(monkeypatch, "theirs:ThirdParty")
    assert isinstance(family_for("x-third-party"), ThirdParty)
    assert known_archs() == tuple(sorted([*Arch, "x-third-party"]))


def test_two_families_can_not_answer_to_one_arch(monkeypatch):
    class Usurper(ThirdParty):
        pass

    points = [
        metadata.EntryPoint(name, f"theirs:{name}", "lora_trainer.families") for name in ("ThirdParty", "Usurper")
    ]
    theirs = type("module", (), {"ThirdParty": ThirdParty, "Usurper": Usurper})
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    with pytest.raises(ValueError, match=r"'x-third-party' is claimed by both ThirdParty and .*Usurper"):
        family_for("zimage")


def test_a_family_of_another_package_has_a_name_that_manifests_can_hold(monkeypatch):
    class Misnamed(ThirdParty):
        arch = ("zimage",)

    monkeypatch.setitem(sys.modules, "theirs", type("module", (), {"Misnamed": Misnamed}))
    pretend_entry_point(monkeypatch, "theirs:Misnamed")
    with pytest.raises(ValueError, match=r"'zimage' of .*Misnamed .*expected one like x-mine"):
        family_for("zimage")
