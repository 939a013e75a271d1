"""The cache of encoded pictures and captions: keys follow content, entries are whole, datasets stay untouched."""

from __future__ import annotations

import shutil

import pytest
import torch

from lora_api.exit_codes import ExitCode
from lora_trainer.data.cache import TensorCache, latents_key, text_key
from lora_trainer.data.encode import captions_of, encode_captions, encode_pictures, pixels_of
from lora_trainer.data.samples import Fingerprints, Sample, plan_samples
from lora_trainer.data.stream import SampleReader
from lora_trainer.errors import TransientError
from tests.trainer.jobs import Job, make_pictures


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"))


def plan(data, resolution=(64,), **options) -> list[Sample]:
    from lora_api.datasets import DatasetConfig

    config = DatasetConfig(folder_path=str(data), resolution=resolution, **options)
    return plan_samples([(data, config)], trigger=None, multiple=16, prints=Fingerprints(None))


class Counting:
    """A base model that counts what it is asked to encode."""

    def __init__(self, model) -> None:
        self._model, self.pictures, self.captions = model, 0, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def encode_pixels(self, pixels):
        self.pictures += 1
        return self._model.encode_pixels(pixels)

    def encode_text(self, text):
        self.captions += 1
        return self._model.encode_text(text)


# ---------------------------------------------------------------------- keys
def test_keys_follow_the_picture_s_bytes_its_size_and_the_model(data, tmp_path, load_tiny, tiny_model_folder):
    model = load_tiny("zimage")
    (sample, *_) = plan(data)
    key = latents_key(sample, model.latents_identity)
    changed = tmp_path / "data"
    shutil.copytree(data, changed)
    (changed / "0.png").write_bytes((changed / "1.png").read_bytes())  # same name and size, other bytes
    assert latents_key(plan(changed)[0], model.latents_identity) != key
    assert latents_key(plan(data, resolution=(32,))[0], model.latents_identity) != key
    assert latents_key(sample, load_tiny("flux2_klein_4b").latents_identity) != key
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(data, elsewhere)
    assert latents_key(plan(elsewhere)[0], model.latents_identity) == key


def test_text_keys_follow_the_caption_and_the_encoder():
    assert len({text_key("a", "e1"), text_key("b", "e1"), text_key("a", "e2")}) == 3


# ---------------------------------------------------------------------- entries
def test_tensors_come_back_to_the_bit_in_their_own_format(tmp_path):
    cache = TensorCache(tmp_path)
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(2, 5).to(torch.bfloat16), "c": torch.arange(3)}
    cache.store("text/" + "0" * 64, tensors)
    loaded = cache.load("text/" + "0" * 64)
    assert all(
        torch.equal(loaded[name], tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in tensors
    )


def test_an_entry_cut_short_counts_as_absent_and_is_made_again(tmp_path, data, load_tiny):
    model, cache, samples = Counting(load_tiny("zimage")), TensorCache(tmp_path), plan(data)
    encode_pictures(samples, model, cache, share=(0, 1), report=str)
    assert model.pictures == len(samples)
    entry = next(tmp_path.rglob("*.safetensors"))
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-7])
    encode_pictures(samples, model, cache, share=(0, 1), report=str)
    assert model.pictures == len(samples) + 1
    assert entry.read_bytes() == whole


def test_a_flipped_bit_is_noticed_when_it_is_read_and_the_entry_removed(tmp_path):
    cache, key = TensorCache(tmp_path), "latents/" + "1" * 64
    cache.store(key, {"latents": torch.randn(4, 4)})
    entry = next(tmp_path.rglob("*.safetensors"))
    raw = bytearray(entry.read_bytes())
    raw[-1] ^= 1
    entry.write_bytes(bytes(raw))
    with pytest.raises(TransientError, match="made again at the next start"):
        cache.load(key)
    assert not cache.holds(key)


def test_pictures_are_shared_among_processes_without_gaps(tmp_path, data, load_tiny):
    model, cache, samples, said = load_tiny("zimage"), TensorCache(tmp_path), plan(data), []
    for rank in (1, 0):
        encode_pictures(samples, model, cache, share=(rank, 2), report=said.append)
        encode_captions(captions_of(samples), model, cache, share=(rank, 2), report=said.append)
    assert all(cache.holds(latents_key(sample, model.latents_identity)) for sample in samples)
    assert all(cache.holds(text_key(sample.caption, model.text_identity)) for sample in samples)
    assert "encoding 1/3 pictures" in said


# ---------------------------------------------------------------------- what comes out
def test_pixels_are_scaled_to_minus_one_and_one(data):
    pixels = pixels_of(plan(data)[0])
    assert pixels.shape == (1, 3, 64, 64)
    assert (pixels.min().item(), pixels.max().item()) == (-1.0, 1.0)


def test_cached_and_fresh_latents_are_the_same(tmp_path, data, load_tiny):
    model, cache, samples = load_tiny("zimage"), TensorCache(tmp_path), plan(data, caption_dropout=0.5)
    encode_pictures(samples, model, cache, share=(0, 1), report=str)
    encode_captions(captions_of(samples), model, cache, share=(0, 1), report=str)
    cached = SampleReader(samples, model, cache)
    fresh = SampleReader(plan(data, cache_latents=False), model, cache)
    for number in range(len(samples)):
        assert torch.equal(cached.latents(number), fresh.latents(number))
    assert torch.equal(cached.condition(0, 0.4)["embeds"], model.encode_text("")["embeds"])
    assert torch.equal(cached.condition(0, 0.6)["embeds"], model.encode_text("gradient number 0")["embeds"])


def test_memory_is_bounded_and_the_oldest_goes_first(tmp_path, data, load_tiny):
    model, cache, samples = load_tiny("zimage"), TensorCache(tmp_path), plan(data)
    encode_pictures(samples, model, cache, share=(0, 1), report=str)
    reader = SampleReader(samples, model, cache, memory_bytes=2 * 16 * 8 * 8 * 4)
    for number in (0, 1, 0, 3):
        reader.latents(number)
    assert len(reader._memory) == 2
    assert reader._used_bytes <= 2 * 16 * 8 * 8 * 4


# ---------------------------------------------------------------------- in a run
def test_a_run_leaves_the_dataset_as_it_was_and_the_second_run_encodes_nothing(tmp_path, data, tiny_model_folder):
    before = sorted(path.name for path in data.rglob("*"))
    job = Job(tmp_path / "one", tiny_model_folder("zimage"), data, tmp_path / "cache", train={"steps": 1})
    assert job.run() == ExitCode.DONE
    assert sorted(path.name for path in data.rglob("*")) == before
    entries = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert job.copy("two").run() == ExitCode.DONE
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")} == entries


def test_training_without_the_cache_gives_the_same_adapter(tmp_path, data, tiny_model_folder):
    cached = Job(tmp_path / "one", tiny_model_folder("zimage"), data, tmp_path / "cache", train={"steps": 3})
    assert cached.run() == ExitCode.DONE
    fresh = cached.copy("two")
    fresh.cache = tmp_path / "other-cache"
    fresh.config["datasets"][0]["cache_latents"] = False
    assert fresh.run() == ExitCode.DONE
    assert not list((tmp_path / "other-cache").rglob("latents/*"))
    assert cached.newest()["adapter.safetensors"] == fresh.newest()["adapter.safetensors"]
