"""A distilled base with its training adapter: merged to train, taken out to draw, and not part of what is exported."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.network import NetworkConfig
from lora_trainer.export import export_final, load_into_pipeline
from lora_trainer.networks import add_adapter, merge_assistant
from tests.trainer.families import PROMPT, load_pipe
from tests.trainer.jobs import Job, make_pictures

SIZE = {"width": 32, "height": 32, "steps": 2, "guidance_scale": 4.0, "seed": 3}


@pytest.fixture
def assistant(load_tiny, tmp_path):
    """A LoRA file that changes the tiny model visibly, and not a bit of it less than it says (alpha is twice the rank)."""
    model = load_tiny("zimage:turbo")
    adapter = add_adapter(model, NetworkConfig(linear=4, linear_alpha=8), seed=5)
    for number, parameter in enumerate(adapter.parameters()):
        parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    return export_final(model, adapter, tmp_path / "assistant", dtype=torch.float32, metadata={})


def weights(model):
    return {name: tensor.clone() for name, tensor in model.pipe.transformer.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_and_taking_out_gives_both_sets_of_weights_to_the_bit(dtype, load_tiny, assistant):
    model = load_tiny("zimage:turbo", dtype)
    plain = weights(model)
    merged_adapter = merge_assistant(model.pipe, assistant)
    merged = weights(model)
    assert merged.keys() == plain.keys(), "no trace of the adapter but in the weights"
    changed = {name for name in plain if not torch.equal(plain[name], merged[name])}
    assert len(changed) == merged_adapter.module_count == len(load_file(assistant)) // 2
    for _ in range(3):
        with merged_adapter.taken_out():
            assert all(torch.equal(plain[name], tensor) for name, tensor in weights(model).items())
        assert all(torch.equal(merged[name], tensor) for name, tensor in weights(model).items())


@torch.no_grad()
def test_the_merged_model_answers_as_the_base_with_the_lora_loaded(load_tiny, tiny_model_folder, assistant):
    model = load_tiny("zimage:turbo")
    x, sigma = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.4])
    conditioning = model.collate([model.encode_text(PROMPT)])
    base = model.velocity(x, sigma, conditioning)
    model.assistant = merge_assistant(model.pipe, assistant)
    merged = model.velocity(x, sigma, conditioning)
    loaded = load_tiny("zimage:turbo")
    load_into_pipeline(loaded.pipe, assistant)
    assert torch.allclose(loaded.velocity(x, sigma, conditioning), merged, atol=1e-4)
    assert (merged - base).abs().max() > 0.05


def test_samples_are_those_of_the_plain_model_with_the_exported_adapter_alone(
    load_tiny, tiny_model_folder, assistant, tmp_path
):
    model = load_tiny("zimage:turbo")
    condition, negative = model.encode_text(PROMPT), model.encode_text("")
    plain = model.sample(condition, None, **SIZE)
    model.assistant = merge_assistant(model.pipe, assistant)
    assert model.sample(condition, None, **SIZE) == plain
    adapter = add_adapter(model, NetworkConfig(linear=4), seed=0)
    assert model.sample(condition, None, **SIZE) == plain, "an adapter that has learned nothing"
    for number, parameter in enumerate(adapter.parameters()):
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    drawn = model.sample(condition, negative, **SIZE)
    assert drawn != plain
    file = export_final(model, adapter, tmp_path / "final", dtype=torch.float32, metadata={})
    fresh = load_tiny("zimage:turbo")
    assert load_into_pipeline(fresh.pipe, file) == adapter.module_count
    assert fresh.sample(condition, None, **SIZE) == drawn


def test_turbo_is_drawn_without_guidance_whatever_is_asked_for(load_tiny):
    model = load_tiny("zimage:turbo")
    condition, negative = model.encode_text(PROMPT), model.encode_text("")
    assert model.sample(condition, negative, **SIZE) == model.sample(condition, None, **SIZE)


def test_the_layouts_of_other_tools_are_merged_too(load_tiny, assistant, tmp_path):
    model, other = load_tiny("zimage:turbo"), load_tiny("zimage:turbo")
    foreign = tmp_path / "foreign.safetensors"
    scaled = {key: value.contiguous() for key, value in load_file(assistant).items()}
    save_file({key.replace("transformer.", "diffusion_model.", 1): value for key, value in scaled.items()}, foreign)
    merge_assistant(model.pipe, assistant)
    merge_assistant(other.pipe, foreign)
    assert all(torch.allclose(weights(other)[name], tensor, atol=1e-6) for name, tensor in weights(model).items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: {}, "holds a LoRA for 0 layers"),
        (
            lambda tensors: {key.replace("layers.", "blocks.", 1): value for key, value in tensors.items()},
            "refuses it",
        ),
        (
            lambda tensors: {key.replace("layers.1.", "layers.7.", 1): v for key, v in tensors.items()},
            "holds a LoRA for 16 layers, and .* took 8 of them",
        ),
        (
            lambda tensors: {key: v * 0 if "lora_B" in key else v for key, v in tensors.items()},
            "changes nothing, all 16 layers of its LoRA are zero",
        ),
    ],
)
def test_a_file_that_is_not_for_this_model_is_refused_and_leaves_it_plain(
    damage, message, load_tiny, assistant, tmp_path
):
    model = load_tiny("zimage:turbo")
    plain = weights(model)
    file = tmp_path / "wrong.safetensors"
    save_file(damage(load_file(assistant)), file)
    with pytest.raises(ValueError, match=rf"wrong\.safetensors: .*{message}"):
        merge_assistant(model.pipe, file)
    assert all(torch.equal(plain[name], tensor) for name, tensor in weights(model).items())


# ---------------------------------------------------------------------- whole runs
def test_a_run_with_a_training_adapter_ends_and_differs_from_one_without(
    assistant, tiny_model_folder, tmp_path, caplog
):
    data = make_pictures(tmp_path / "data", [(64, 64)] * 2)
    ends = []
    for name, path in (("with", str(assistant)), ("without", None)):
        folder = tiny_model_folder("zimage:turbo")
        job = Job(tmp_path / name, folder, data, tmp_path / "cache", "zimage:turbo", train={"steps": 2})
        if path:
            job.change(model={"assistant_lora_path": path})
        with caplog.at_level(logging.WARNING):
            assert job.run() == ExitCode.DONE
        ends.append(job.store.get(layout.FINAL + "adapter.safetensors")[-1000:])
        assert ("the base model is distilled" in caplog.text) is (path is None)
    assert ends[0] != ends[1]


def test_a_training_adapter_that_is_missing_is_named(tiny_model_folder, tmp_path):
    data = make_pictures(tmp_path / "data", [(64, 64)])
    job = Job(tmp_path / "job", tiny_model_folder("zimage:turbo"), data, tmp_path / "cache", "zimage:turbo")
    job.change(model={"assistant_lora_path": str(tmp_path / "nothing.safetensors")})
    assert job.run() == ExitCode.DATA
    assert job.word().message == f"config.model.assistant_lora_path: {tmp_path}/nothing.safetensors is not a file"


def test_a_distilled_klein_is_told_from_its_base_by_its_index(tiny_model_folder, tmp_path):
    from lora_trainer.families import family_for

    folder = tmp_path / "distilled"
    shutil.copytree(tiny_model_folder("flux2_klein_4b"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    family = family_for("flux2_klein_4b")

    def advice():
        return family.distilled(family.load(folder, dtype=torch.float32, device=torch.device("cpu")))

    assert advice() is None
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    assert "black-forest-labs/FLUX.2-klein-base-4B" in advice()
    load_pipe(folder)
