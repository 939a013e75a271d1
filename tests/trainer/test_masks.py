"""Masks: found, held against their pictures, brought to the size of latents, and what they do to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lora_api.config import DatasetConfig
from lora_api.exit_codes import ExitCode
from lora_trainer.data.buckets import Size
from lora_trainer.data.cache import TensorCache, latents_key, mask_key
from lora_trainer.data.encode import encode_masks, encode_pictures, pixels_of
from lora_trainer.data.masks import Mask, latent_mask, mask_of
from lora_trainer.data.samples import Fingerprints, digest, plan_samples
from lora_trainer.data.scan import Picture
from lora_trainer.data.stream import SampleReader
from lora_trainer.errors import DataError
from tests.trainer.clips import make_clip
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.test_resume import same_training


def grey(path: Path, values: Any, mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values, dtype=np.uint8)).convert(mode).save(path)
    return path


def halves(width: int, height: int) -> np.ndarray:
    """Black on the left, white on the right."""
    return np.where(np.arange(width) < width // 2, 0, 255)[None].repeat(height, 0)


def mask_at(path: Path, **options: Any) -> Mask:
    return Mask(path, "0", **{"alpha": False, "inverted": False, "least": 0.0} | options)


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def config(folder: Path, **options: Any) -> DatasetConfig:
    return DatasetConfig.model_validate({"folder_path": str(folder), "resolution": [64], **options})


def planned(folder: Path, masks: Path | None = None, **options: Any):
    if masks is not None:
        options["mask_path"] = str(masks)
    return plan_samples(
        [(folder, config(folder, **options))], trigger=None, multiple=16, prints=Fingerprints(None), masks=[masks]
    )


@pytest.fixture
def data(tmp_path):
    """Three pictures of two sizes with masks that show their right half."""
    folder = make_pictures(tmp_path / "data", [(64, 64), (64, 64), (96, 64)])
    for picture in folder.glob("*.png"):
        grey(tmp_path / "masks" / picture.name, halves(*size_of(picture)))
    return folder


# ---------------------------------------------------------------------- values
def test_each_latent_pixel_has_the_mean_of_the_area_that_it_stands_for(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (64, 96))
    found = latent_mask(mask_at(grey(tmp_path / "m.png", values)), Size(96, 64), (16, 8, 12))
    expected = np.array(
        [[values[8 * y : 8 * y + 8, 8 * x : 8 * x + 8].mean() / 255 for x in range(12)] for y in range(8)]
    )
    assert found.shape == (1, 8, 12)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    assert latent_mask(mask_at(tmp_path / "m.png"), Size(96, 64), (16, 3, 8, 12)).shape == (1, 1, 8, 12)


def test_a_mask_is_turned_resized_and_cut_like_its_picture(tmp_path):
    """The picture is its own mask: both must show the same things at the same places."""
    across, down = np.meshgrid(np.arange(400), np.arange(202))
    values = np.where((across // 50 + down // 50) % 2, 160, 20) + across // 5
    picture = Image.fromarray(values.astype(np.uint8)).convert("RGB")
    exif = picture.getexif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "0.png", exif=exif)
    (sample,) = planned(tmp_path, tmp_path)
    assert sample.bucket.height > sample.bucket.width
    found = latent_mask(sample.mask, sample.bucket, (1, sample.bucket.height // 4, sample.bucket.width // 4))
    pixels = (pixels_of(sample)[0].mean(0) + 1) / 2
    expected = torch.nn.functional.avg_pool2d(pixels[None], 4).numpy()
    assert np.abs(found - expected).mean() < 0.02
    assert np.abs(found - expected[:, ::-1]).mean() > 0.1
    assert np.abs(found - expected[:, :, ::-1]).mean() > 0.1


def test_inverting_and_a_lowest_value_change_what_grey_stands_for(tmp_path):
    path = grey(tmp_path / "m.png", halves(32, 16))
    shape, bucket = (1, 1, 2), Size(32, 16)
    assert latent_mask(mask_at(path), bucket, shape).tolist() == [[[0, 1]]]
    assert latent_mask(mask_at(path, inverted=True), bucket, shape).tolist() == [[[1, 0]]]
    assert latent_mask(mask_at(path, least=0.25), bucket, shape).tolist() == [[[0.25, 1]]]
    assert latent_mask(mask_at(path, least=0.25, inverted=True), bucket, shape).tolist() == [[[1, 0.25]]]


def test_masks_of_other_modes_are_read_by_their_brightness(tmp_path):
    expected = [[[0, 1]]]
    for mode in ("1", "RGB", "P"):
        path = grey(tmp_path / f"{mode}.png", halves(32, 16), mode)
        assert latent_mask(mask_at(path), Size(32, 16), (1, 1, 2)).tolist() == expected, mode
    deep = tmp_path / "16.png"
    Image.fromarray((halves(32, 16) * 257).astype(np.uint16)).save(deep)
    assert latent_mask(mask_at(deep), Size(32, 16), (1, 1, 2)).tolist() == [[[0, 1]]]


def test_the_alpha_channel_counts_and_not_the_colours_under_it(tmp_path):
    rgba = np.zeros((16, 32, 4), dtype=np.uint8)
    rgba[..., 0], rgba[..., 3] = 255, halves(32, 16)
    Image.fromarray(rgba).save(tmp_path / "0.png")
    (sample,) = planned(tmp_path, alpha_mask=True)
    assert latent_mask(sample.mask, Size(32, 16), (1, 1, 2)).tolist() == [[[0, 1]]]
    assert latent_mask(mask_at(tmp_path / "0.png"), Size(32, 16), (1, 1, 2))[0, 0, 0] == 0, (
        "a mask's own alpha is black"
    )


# ---------------------------------------------------------------------- mistakes
def test_a_missing_mask_is_an_error_that_names_picture_and_mask(data, tmp_path):
    (tmp_path / "masks" / "1.png").unlink()
    with pytest.raises(DataError, match=r"data/1\.png: there is no mask .*masks/1\.png; every picture"):
        planned(data, tmp_path / "masks")


def test_a_mask_of_another_aspect_is_an_error_and_one_of_another_size_is_not(data, tmp_path):
    grey(tmp_path / "masks" / "2.png", halves(48, 32))
    assert len(planned(data, tmp_path / "masks")) == 3
    grey(tmp_path / "masks" / "2.png", halves(64, 64))
    with pytest.raises(DataError, match=r"masks/2\.png: the mask has 64x64 pixels, its picture .*data/2\.png 96x64"):
        planned(data, tmp_path / "masks")


def test_a_black_mask_is_an_error_and_with_a_lowest_value_a_warning(tmp_path, caplog):
    path = grey(tmp_path / "m.png", np.zeros((16, 32)))
    with pytest.raises(DataError, match=r"m\.png: the mask is black wherever its picture is trained"):
        latent_mask(mask_at(path), Size(32, 16), (1, 1, 2))
    assert latent_mask(mask_at(path, least=0.5), Size(32, 16), (1, 1, 2)).tolist() == [[[0.5, 0.5]]]
    assert "m.png: the mask is black" in caplog.text


def test_pictures_without_an_alpha_channel_and_clips_are_refused_by_name(data, tmp_path):
    (first, *_) = planned(data, alpha_mask=True)
    with pytest.raises(DataError, match=r"data/0\.png: found a picture without an alpha channel"):
        latent_mask(first.mask, first.bucket, (1, 8, 8))
    clip = Picture(tmp_path / "c.mp4", None)
    with pytest.raises(DataError, match=r"c\.mp4: alpha_mask: true, but clips have no alpha channel"):
        mask_of(clip, config(tmp_path, alpha_mask=True), (tmp_path, None), Fingerprints(None).of)


def test_a_file_that_is_no_picture_is_named(data, tmp_path):
    path = grey(tmp_path / "masks" / "0.png", np.random.default_rng(0).integers(0, 256, (64, 64)))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"masks/0\.png: not a readable picture"):
        planned(data, tmp_path / "masks")
    with pytest.raises(DataError, match=r"masks/0\.png: not a readable picture"):
        latent_mask(mask_at(path), Size(64, 64), (1, 8, 8))


# ---------------------------------------------------------------------- places
def test_masks_lie_at_the_same_place_or_right_in_the_folder_and_may_have_another_ending(tmp_path):
    make_pictures(tmp_path / "data" / "a", [(64, 64)])
    grey(tmp_path / "masks" / "0.webp", np.full((64, 64), 255))
    (flat,) = planned(tmp_path / "data", tmp_path / "masks")
    assert flat.mask.path == tmp_path / "masks" / "0.webp"
    grey(tmp_path / "masks" / "a" / "0.jpg", np.full((64, 64), 255))
    (nested,) = planned(tmp_path / "data", tmp_path / "masks")
    assert nested.mask.path == tmp_path / "masks" / "a" / "0.jpg"


def test_keys_and_digest_without_a_mask_are_what_they_were(data, tmp_path):
    plain, masked = planned(data), planned(data, tmp_path / "masks")
    assert [latents_key(a, "x") for a in plain] == [latents_key(b, "x") for b in masked]
    assert digest(plain) != digest(masked)
    lines = sorted(f"{s.sha256} {s.bucket} " for s in plain)
    assert lines == sorted(set(lines))
    keys = {mask_key(sample, "x") for sample in masked}
    keys |= {mask_key(s, "x") for s in planned(data, tmp_path / "masks", invert_mask=True)}
    keys |= {mask_key(s, "x") for s in planned(data, tmp_path / "masks", mask_min_value=0.1)}
    keys |= {mask_key(sample, "y") for sample in masked}
    assert len(keys) == 4 * 2, "two of the three masks and buckets are the same"


# ---------------------------------------------------------------------- cache and batches
@pytest.mark.parametrize("arch", ["zimage", "flux2_klein_4b", "sd15"])
def test_masks_are_cached_at_the_size_of_the_family_s_latents(arch, data, tmp_path, load_tiny):
    model, cache = load_tiny(arch), TensorCache(tmp_path / "cache")
    samples = planned(data, tmp_path / "masks") if arch != "sd15" else planned(data, tmp_path / "masks")[:2]
    for encode in (encode_pictures, encode_masks):
        encode(samples, model, cache, share=(0, 1), report=str)
    reader = SampleReader(samples, model, cache)
    assert reader.masked
    for number, sample in enumerate(samples):
        latents = reader.latents(number)
        mask = reader.mask(number, latents)
        assert mask.shape == (1, *latents.shape[-2:])
        assert mask.mean().item() == pytest.approx(0.5)
        assert (mask[..., 0] == 0).all()
        assert cache.holds(mask_key(sample, model.latents_identity))


def test_masks_of_clips_hold_for_every_frame(tmp_path, load_tiny):
    model, cache = load_tiny("wan21"), TensorCache(tmp_path / "cache")
    make_clip(tmp_path / "data" / "clip.mp4")
    size = Fingerprints(None).of(tmp_path / "data" / "clip.mp4")[1]
    grey(tmp_path / "masks" / "clip.png", halves(size.width, size.height))
    (sample,) = planned(tmp_path / "data", tmp_path / "masks", num_frames=5)
    for encode in (encode_pictures, encode_masks):
        encode([sample], model, cache, share=(0, 1), report=str)
    reader = SampleReader([sample], model, cache)
    latents = reader.latents(0)
    assert latents.ndim == 4
    assert reader.mask(0, latents).shape == (1, 1, *latents.shape[-2:])


# ---------------------------------------------------------------------- whole jobs
def masked_job(tmp_path, tiny_model_folder, data, **options) -> Job:
    job = Job(tmp_path / "whole", tiny_model_folder("zimage"), data, tmp_path / "cache")
    job.config["datasets"][0] |= {"mask_path": str(tmp_path / "masks"), **options}
    return job.change(train={"steps": 5})


def test_interruptions_change_no_bit_and_the_mask_matters(tmp_path, tiny_model_folder, data):
    whole = masked_job(tmp_path, tiny_model_folder, data)
    assert whole.run() == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(stop_after=2) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)
    at_once = masked_job(tmp_path, tiny_model_folder, data, cache_latents=False)
    at_once.folder = tmp_path / "at-once"
    assert at_once.run() == ExitCode.DONE
    assert same_training(whole, at_once), "read again at each step, or cached"
    plain = masked_job(tmp_path, tiny_model_folder, data)
    plain.folder = tmp_path / "plain"
    del plain.config["datasets"][0]["mask_path"]
    assert plain.run() == ExitCode.DONE
    assert not same_training(whole, plain)


def test_white_masks_train_what_no_masks_train_but_for_rounding(tmp_path, tiny_model_folder, data):
    for path in (tmp_path / "masks").glob("*.png"):
        grey(path, np.full(size_of(path)[::-1], 255))
    losses = []
    for name in ("masked", "plain"):
        job = masked_job(tmp_path, tiny_model_folder, data)
        job.folder = tmp_path / name
        if name == "plain":
            del job.config["datasets"][0]["mask_path"]
        assert job.run() == ExitCode.DONE
        losses.append([line["loss"] for line in job.metrics() if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_mask_that_can_not_be_used_ends_with_65_and_names_the_file(tmp_path, tiny_model_folder, data):
    job = masked_job(tmp_path, tiny_model_folder, data)
    grey(tmp_path / "masks" / "0.png", np.zeros((64, 64)))
    assert job.run() == ExitCode.DATA
    assert "masks/0.png: the mask is black" in job.word().message
