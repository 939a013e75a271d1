"""Twenty steps of every family give the losses of an independent implementation, written from papers and model cards.

The references in `tests/reference` import nothing of the trainer: they read the same pictures, clips and captions from
the folder and derive order, noise, encoding, loss and update on their own. Losses are compared in full precision as the
loop reports them, fp32 on the CPU. For every family, mistakes that a falling loss would not show are made on purpose.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lora_api.exit_codes import ExitCode
from lora_trainer.families import flux1, flux2_dev, sdxl, wan
from lora_trainer.families.base import BaseModel
from lora_trainer.families.flow import FlowModel
from lora_trainer.families.unet import UNetModel
from lora_trainer.reporting import Reporter
from tests.reference.common import Recipe
from tests.trainer.jobs import Job

TOLERANCE = 1e-5
RECIPE = Recipe()
SIZES = [(64, 64), (128, 64), (64, 64), (128, 64), (64, 64)]  # nothing is scaled or cut, for any family
CAPTIONS = ["a red cube on a table", "[trigger] by the sea", "cat", "photo of mascotxyz at night", "a small green ball"]


@dataclass(frozen=True)
class Case:
    """A family, its reference, and what differs from the usual run."""

    arch: str
    reference: str
    recipe: Recipe = RECIPE
    clips: bool = False


CASES = {
    "flux2_klein_4b": Case("flux2_klein_4b", "flux2_klein"),
    "flux2_klein_4b with whole Kronecker factors": Case("flux2_klein_4b", "flux2_klein", replace(RECIPE, kind="lokr")),
    "flux2_dev": Case("flux2_dev", "flux2_dev"),
    "zimage": Case("zimage", "zimage", replace(RECIPE, accumulation=2)),
    "zimage:turbo": Case("zimage:turbo", "zimage", replace(RECIPE, assistant=Path("assistant.safetensors"))),
    "flux1": Case("flux1", "flux1"),
    "sd15": Case("sd15", "sd15"),
    "sd15 with convolutions and text encoder": Case("sd15", "sd15", replace(RECIPE, conv=2, train_text_encoder=True)),
    "sdxl": Case("sdxl", "sdxl"),
    "qwen_image": Case("qwen_image", "qwen_image"),
    "wan21": Case("wan21", "wan", clips=True),
    "wan22": Case("wan22", "wan", clips=True),
}


def make_data(folder: Path, *, clips: bool) -> Path:
    """Five pictures of two shapes, or two pictures and three clips."""
    from tests.trainer.clips import make_clip

    folder.mkdir()
    for number, ((width, height), caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
        (folder / f"{number}.txt").write_text(caption)
        if clips and number >= 2:
            make_clip(folder / f"{number}.mkv", frames=5, size=(width, height))
            continue
        across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
        pixels = np.stack([across**2, down, np.sin(9 * across + number) / 2 + 0.5], axis=-1)
        Image.fromarray((pixels * 255).astype(np.uint8)).save(folder / f"{number}.png")
    return folder


def make_lively(folder: Path, target: Path) -> Path:
    """A copy of a tiny model whose answer depends as much on text and time as on the latents.

    As they are drawn, the signal fades from layer to layer, and a wrong caption would change a loss by less than rounding.
    Here each matrix keeps the variance of its inputs, and tokens are told apart.
    """
    shutil.copytree(folder, target)
    for part in ("transformer", "transformer_2", "unet", "text_encoder", "text_encoder_2"):
        for file in (target / part).glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if tensor.ndim >= 2 and float(tensor.std()) > 0:
                    tokens = any(word in name for word in ("embed_tokens", "token_embedding", "shared"))
                    inputs = 1 if tokens else tensor[0].numel()
                    tensors[name] = tensor / tensor.std() / inputs**0.5
            save_file(tensors, file, {"format": "pt"})
    return target


def make_assistant(file: Path) -> Path:
    """A training adapter as they are published: original names, no alpha."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for block in (0, 1):
        for layer, width in (("attention.to_q", 64), ("attention.to_out.0", 64)):
            name = f"diffusion_model.layers.{block}.{layer}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(2, width, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(64, 2, generator=generator) * 0.2
    save_file(tensors, file)
    return file


@pytest.fixture(scope="module")
def reference(prepared) -> Callable[[str], list[float]]:
    """The losses of a case's reference; computed once."""

    @cache
    def losses(name: str) -> list[float]:
        case, model, data = prepared(name)
        found: list[float] = importlib.import_module(f"tests.reference.{case.reference}").losses(
            model, data, case.recipe
        )
        return found

    return losses


@pytest.fixture(scope="module")
def prepared(tiny_model_folder, tmp_path_factory) -> Callable[[str], tuple[Case, Path, Path]]:
    """A case with its model and data; made once."""
    root = tmp_path_factory.mktemp("golden")

    @cache
    def model_of(arch: str) -> Path:
        return make_lively(tiny_model_folder(arch), root / f"model-{arch}")

    pictures, clips = make_data(root / "pictures", clips=False), make_data(root / "clips", clips=True)
    assistant = make_assistant(root / "assistant.safetensors")

    def prepare(name: str) -> tuple[Case, Path, Path]:
        case = CASES[name]
        if case.recipe.assistant is not None:
            case = replace(case, recipe=replace(case.recipe, assistant=assistant))
        return case, model_of(case.arch), clips if case.clips else pictures

    return prepare


def job_of(case: Case, model: Path, data: Path, folder: Path) -> Job:
    """The recipe as a configuration."""
    recipe = case.recipe
    job = Job(folder / "job", model, data, folder / "cache", case.arch)
    job.change(trigger_word=recipe.trigger, save={"save_every": 10_000, "dtype": "fp32"})
    if recipe.kind == "lora":
        job.config["network"] = {"type": "lora", "linear": recipe.rank, "linear_alpha": recipe.alpha}
    else:
        job.config["network"] = {"type": "lokr", "lokr_full_rank": True}
    if recipe.conv:
        job.config["network"] |= {"conv": recipe.conv, "conv_alpha": recipe.conv}
    if recipe.assistant is not None:
        job.config["model"]["assistant_lora_path"] = str(recipe.assistant)
    job.config["datasets"][0] |= {"resolution": [128], "caption_dropout": recipe.caption_dropout}
    if case.clips:
        job.config["datasets"][0]["num_frames"] = 5
    job.config["train"] = {
        "steps": recipe.steps, "batch_size": recipe.batch_size, "gradient_accumulation": recipe.accumulation,
        "lr": recipe.lr, "seed": recipe.seed, "dtype": "fp32", "train_text_encoder": recipe.train_text_encoder,
        "adam_beta1": recipe.beta1, "adam_beta2": recipe.beta2, "adam_epsilon": recipe.epsilon,
        "weight_decay": recipe.weight_decay, "max_grad_norm": recipe.max_grad_norm,
    }  # fmt: skip
    return job


def losses_of(job: Job) -> list[float]:
    """What the trainer reports, unrounded."""
    found: list[float] = []
    original = Reporter.stepped

    def stepped(reporter: Reporter, *, loss: float, **facts: Any) -> None:
        found.append(loss)
        original(reporter, loss=loss, **facts)

    with patch.object(Reporter, "stepped", stepped):
        assert job.run() == ExitCode.DONE, job.word()
    return found


def difference(ours: list[float], theirs: list[float]) -> float:
    """The largest difference over the steps that both have."""
    assert ours
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=False))


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_give_the_losses_of_the_reference(name, prepared, reference, tmp_path):
    case, model, data = prepared(name)
    ours, theirs = losses_of(job_of(case, model, data, tmp_path)), reference(name)
    assert len(ours) == len(theirs) == 20
    assert difference(ours, theirs) < TOLERANCE


def test_the_two_sizes_of_klein_are_one_family(prepared, reference, tmp_path):
    case, _, data = prepared("flux2_klein_4b")
    other = replace(case, arch="flux2_klein_9b", recipe=replace(case.recipe, steps=2))
    ours = losses_of(job_of(other, prepared("flux2_klein_4b")[1], data, tmp_path))
    assert difference(ours, reference("flux2_klein_4b")) < TOLERANCE


# ---------------------------------------------------------------------- mistakes that must show
@contextmanager
def wrong_prediction(wrong: Callable[..., torch.Tensor]) -> Iterator[None]:
    """`wrong(predict, x_t, time, conditioning)` in place of the prediction of every family."""

    def patched(original):
        return lambda model, x_t, time, cond: wrong(lambda *args: original(model, *args), x_t, time, cond)

    with (
        patch.object(FlowModel, "predict", patched(FlowModel.predict)),
        patch.object(UNetModel, "predict", patched(UNetModel.predict)),
    ):
        yield


def flipped(time: torch.Tensor) -> torch.Tensor:
    return 1 - time if time.is_floating_point() else 999 - time


def larger_latents():
    original = BaseModel.encode_pixels
    return patch.object(BaseModel, "encode_pixels", lambda model, pixels: 1.5 * original(model, pixels))


def another_template():
    original = BaseModel.encode_text
    return patch.object(BaseModel, "encode_text", lambda model, caption: original(model, f"a photo of {caption}"))


MISTAKES = {
    "sign": lambda: wrong_prediction(lambda predict, x_t, time, conditioning: -predict(x_t, time, conditioning)),
    "time": lambda: wrong_prediction(
        lambda predict, x_t, time, conditioning: predict(x_t, flipped(time), conditioning)
    ),
    "latents": larger_latents,
    "captions": another_template,
}
FAMILIES = [name for name in CASES if " " not in name]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mistake_in_the_wiring_shows_at_the_first_step(name, mistake, prepared, reference, tmp_path):
    case, model, data = prepared(name)
    with MISTAKES[mistake]():
        wrong = losses_of(job_of(replace(case, recipe=replace(case.recipe, steps=1)), model, data, tmp_path))
    assert difference(wrong, reference(name)) > 100 * TOLERANCE


def without_shift():
    return (patch.object(FlowModel, "shift_sigma", lambda model, u, shape=(): u),)


def exchanged_experts():
    original = wan.Experts.forward

    def exchanged(experts, **inputs):
        twin = wan.Experts(experts.transformer_2, experts.transformer, experts.boundary)
        return original(twin, **inputs)

    return (patch.object(wan.Experts, "forward", exchanged),)


def swapped_sizes():
    original = sdxl.SDXLModel._added_conditions

    def swapped(model, x_t, conditioning):
        added = original(model, x_t, conditioning)
        return added | {"time_ids": added["time_ids"][:, [1, 0, 2, 3, 5, 4]]}

    return (patch.object(sdxl.SDXLModel, "_added_conditions", swapped),)


PARTICULAR = [
    ("zimage", without_shift),
    ("wan21", without_shift),
    ("wan22", exchanged_experts),
    ("sdxl", swapped_sizes),
    ("flux1", lambda: (patch.object(flux1, "TRAINING_GUIDANCE", 3.5),)),
    ("flux2_dev", lambda: (patch.object(flux2_dev, "TRAINING_GUIDANCE", 3.5),)),
]


@pytest.mark.parametrize(("name", "patches"), PARTICULAR, ids=[name for name, _ in PARTICULAR])
def test_a_mistake_that_only_some_families_can_make_shows_too(name, patches, prepared, reference, tmp_path):
    case, model, data = prepared(name)
    with ExitStack() as stack:
        for each in patches():
            stack.enter_context(each)
        wrong = losses_of(job_of(replace(case, recipe=replace(case.recipe, steps=1)), model, data, tmp_path))
    assert difference(wrong, reference(name)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("zimage", {"alpha": 4.0}),
        ("zimage", {"lr": 1e-3}),
        ("zimage", {"accumulation": 1}),
        ("zimage", {"caption_dropout": 0.0}),
        ("zimage:turbo", {"assistant": None}),
        ("sd15 with convolutions and text encoder", {"conv": 0}),
        ("sd15 with convolutions and text encoder", {"train_text_encoder": False}),
    ],
    ids=str,
)
def test_a_setting_without_effect_would_show_within_five_steps(name, change, prepared, reference, tmp_path):
    case, model, data = prepared(name)
    other = replace(case, recipe=replace(case.recipe, steps=5, **change))
    assert difference(losses_of(job_of(other, model, data, tmp_path)), reference(name)) > 10 * TOLERANCE
