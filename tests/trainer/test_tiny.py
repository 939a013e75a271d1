"""Tiny models: the real classes, quick to make, good enough to learn on."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
import torch

from lora_api.archs import Arch
from lora_trainer.tiny import make_tiny
from lora_trainer.tiny.make import BUILDERS

CLASSES = {
    "zimage": ("ZImagePipeline", "ZImageTransformer2DModel", "AutoencoderKL"),
    "flux2_klein_4b": ("Flux2KleinPipeline", "Flux2Transformer2DModel", "AutoencoderKLFlux2"),
    "flux1": ("FluxPipeline", "FluxTransformer2DModel", "AutoencoderKL"),
    "sd15": ("StableDiffusionPipeline", "UNet2DConditionModel", "AutoencoderKL"),
    "sdxl": ("StableDiffusionXLPipeline", "UNet2DConditionModel", "AutoencoderKL"),
}


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_there_is_a_tiny_model_for_every_arch():
    assert set(BUILDERS) == {arch.value for arch in Arch}


@pytest.mark.parametrize("arch", CLASSES)
def test_tiny_models_are_of_the_real_classes_and_a_few_megabytes(arch, tiny_model_folder):
    folder = tiny_model_folder(arch)
    index = json.loads((folder / "model_index.json").read_text())
    assert (index["_class_name"], index.get("transformer", index.get("unet"))[1], index["vae"][1]) == CLASSES[arch]
    assert sum(len(content) for content in files_of(folder).values()) < 4e6
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (folder, *folder.rglob("*"))), "other users can read it"


def test_the_same_seed_makes_the_same_model_and_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = files_of(make_tiny("zimage", tmp_path / "a", seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert files_of(make_tiny("zimage", tmp_path / "b", seed=1)) == first
    assert files_of(make_tiny("zimage", tmp_path / "c", seed=2)) != first


@pytest.mark.parametrize("suffix", ["", "</w>"])
def test_every_process_gives_the_tokens_the_same_numbers(suffix):
    program = f"from lora_trainer.tiny.tokenizer import _byte_pairs; print(_byte_pairs(900, {suffix!r}))"
    outputs = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        for _ in range(3)
    }
    assert len(outputs) == 1
    vocabulary, merges = ast.literal_eval(outputs.pop())
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert all(first + second in vocabulary for first, second in merges)


def test_a_model_that_is_there_is_kept_and_another_folder_is_not_overwritten(tmp_path):
    folder = make_tiny("zimage", tmp_path / "model")
    before = files_of(folder)
    assert files_of(make_tiny("zimage", folder, seed=9)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="exists and is no model folder"):
        make_tiny("zimage", tmp_path / "mine")
    with pytest.raises(ValueError, match=r"no tiny model of 'dall-e'; there are flux1, .*flux2_klein_4b"):
        make_tiny("dall-e", tmp_path / "other")


@pytest.mark.parametrize(
    ("arch", "least"),
    [("zimage", 17), ("flux2_klein_4b", 17), ("sd15", 16)],  # a quarter of the channels keeps a little less
)
def test_its_vae_shows_what_a_photograph_is_of(arch, least, load_tiny):
    photo = photograph(128)
    model = load_tiny(arch)
    latents = model.encode_pixels(photo)
    with torch.no_grad():
        again = model.pipe.vae.decode(model.denormalise(latents[None])).sample.clamp(-1, 1)
    decibel = -10 * torch.log10(((again - photo) ** 2).mean() / 4)
    blurred = torch.nn.functional.interpolate(
        torch.nn.functional.interpolate(photo, size=(8, 8), mode="area"), size=(128, 128), mode="bicubic"
    ).clamp(-1, 1)
    assert decibel > least
    assert decibel > -10 * torch.log10(((blurred - photo) ** 2).mean() / 4), "better than sixteen-fold blur"


@pytest.mark.parametrize("arch", CLASSES)
def test_its_latents_have_about_unit_variance(arch, load_tiny):
    latents = load_tiny(arch).encode_pixels(photograph(128))
    assert 0.3 < latents.std() < 2
    assert latents.mean().abs() < 0.7


def test_an_adapter_learns_a_picture_quickly(load_tiny):
    from lora_api.network import NetworkConfig
    from lora_trainer.networks import add_adapter

    model = load_tiny("zimage")
    adapter = add_adapter(model, NetworkConfig(linear=16), seed=0)
    x0 = model.encode_pixels(photograph(64)).expand(2, -1, -1, -1)
    conditioning = model.collate([model.encode_text("an astronaut")] * 2)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        noise = torch.randn(x0.shape, generator=generator)
        sigma = model.shift_sigma(torch.rand(2, generator=generator))
        s = sigma.view(-1, 1, 1, 1)
        loss = (model.velocity((1 - s) * x0 + s * noise, sigma, conditioning) - (noise - x0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def photograph(side: int) -> torch.Tensor:
    """A real photograph, (1, 3, side, side) in [-1, 1]."""
    from skimage import data

    pixels = torch.from_numpy(data.astronaut().copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    return torch.nn.functional.interpolate(pixels, size=(side, side), mode="area")
