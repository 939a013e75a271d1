"""Clips as training data: which frames are taken, and what becomes of them."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lora_api.datasets import DatasetConfig
from lora_api.exit_codes import ExitCode
from lora_trainer.data import clips
from lora_trainer.data.buckets import Size
from lora_trainer.data.cache import latents_key
from lora_trainer.data.clips import Clip, clip_of, frames_at, frames_over, load_frames
from lora_trainer.data.encode import pixels_of
from lora_trainer.data.samples import Fingerprints, digest, plan_samples
from lora_trainer.errors import DataError
from tests.trainer.clips import CODECS, GREY_STEP, make_clip, make_clips
from tests.trainer.jobs import Job, make_pictures

TEN_SECONDS = Clip(Size(64, 64), 241, 24.0)


def plan(folder, prints=None, **config):
    config = DatasetConfig(folder_path=str(folder), **{"resolution": (64,), "num_frames": 5} | config)
    return plan_samples([(folder, config)], trigger=None, multiple=16, prints=prints or Fingerprints(None))


# ---------------------------------------------------------------------- which frames
def test_frames_over_a_clip_reach_from_its_first_to_its_last():
    assert frames_over(TEN_SECONDS, 5) == (0, 60, 120, 180, 240)
    assert frames_over(TEN_SECONDS, 1) == (0,)
    assert frames_over(Clip(Size(64, 64), 3, 24.0), 5) == (0, 0, 1, 2, 2)


def test_frames_at_a_rate_are_that_far_apart_and_begin_where_the_seed_says():
    starts = set()
    for seed in range(20):
        frames = frames_at(TEN_SECONDS, 5, 8, seed=seed)
        assert {later - earlier for earlier, later in pairwise(frames)} == {3}
        assert frames[-1] <= 240
        assert frames == frames_at(TEN_SECONDS, 5, 8, seed=seed)
        starts.add(frames[0])
    assert len(starts) > 10


def test_a_clip_that_is_too_short_for_the_rate_is_stretched_over_the_frames():
    assert frames_at(TEN_SECONDS, 241, 12, seed=1) == frames_over(TEN_SECONDS, 241)


def test_a_slow_clip_shows_frames_more_than_once_at_a_higher_rate():
    assert frames_at(Clip(Size(64, 64), 3, 8.0), 5, 16, seed=0) == (0, 0, 1, 2, 2)


# ---------------------------------------------------------------------- reading
@pytest.mark.parametrize("ending", CODECS)
def test_every_container_is_read(ending, tmp_path):
    path = make_clip(tmp_path / f"clip{ending}")
    assert clip_of(path) == Clip(Size(64, 48), 12, pytest.approx(8.0, rel=0.01))
    frames = load_frames(path, Size(64, 48), (0, 5, 11))
    assert frames.shape == (3, 48, 64, 3)
    assert np.abs(frames[:, 24, 40].mean(-1) - np.array([0, 50, 110])).max() < 12


def test_frames_are_exactly_those_asked_for_in_any_order_and_number(tmp_path):
    path = make_clip(tmp_path / "clip.mkv")
    frames = load_frames(path, Size(64, 48), (7, 7, 2))
    assert (frames[:, 24, 40, 0] == np.array([7, 7, 2]) * GREY_STEP).all()


def test_pixels_of_a_clip_have_frames_behind_the_channels_and_are_cut_at_the_centre(tmp_path):
    make_clip(tmp_path / "clip.mkv", size=(128, 64))
    sample = plan(tmp_path, resolution=(64,))[0]
    pixels = pixels_of(sample)
    assert pixels.shape == (1, 3, 5, sample.bucket.height, sample.bucket.width)
    assert (pixels.min(), pixels.max()) == (-1, 1)
    expected = np.array(sample.frames) * GREY_STEP / 127.5 - 1
    assert np.allclose(pixels[0, 0, :, 8, 40].numpy(), expected, atol=1e-6)


def test_frames_that_a_phone_turned_are_set_upright():
    left_is_red = Image.new("RGB", (64, 32))
    left_is_red.paste((255, 0, 0), (0, 0, 8, 32))
    frame = SimpleNamespace(to_image=lambda: left_is_red, rotation=-90, width=64, height=32)
    upright = clips._upright(frame)
    assert clips._upright_size(frame) == Size(*upright.size) == Size(32, 64)
    assert upright.getpixel((16, 1)) == (255, 0, 0), "a quarter clockwise: what was left is on top"
    level = SimpleNamespace(to_image=lambda: left_is_red, rotation=0, width=64, height=32)
    assert clips._upright(level) is left_is_red


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "not a readable video"), (b"no video at all" * 100, "not a readable video")],
)
def test_a_file_that_is_no_video_is_named(content, message, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(content)
    with pytest.raises(DataError, match=rf"broken\.mp4: {message}"):
        plan(tmp_path)


def test_a_video_that_was_cut_short_is_named(tmp_path):
    path = make_clip(tmp_path / "short.mp4", frames=40)
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(DataError, match=r"short\.mp4: not a readable video"):
        plan(tmp_path)


def test_a_clip_that_lost_frames_since_it_was_first_seen_is_named(tmp_path):
    path = make_clip(tmp_path / "clip.mkv", frames=4)
    with pytest.raises(DataError, match=r"clip\.mkv: frame 9 is missing"):
        load_frames(path, Size(64, 48), (0, 9))


# ---------------------------------------------------------------------- the plan
def test_a_set_of_clips_takes_pictures_as_clips_of_one_frame_in_groups_of_their_own(tmp_path):
    make_clips(tmp_path, 2, size=(64, 64))
    make_pictures(tmp_path / "more", [(64, 64)])
    samples = plan(tmp_path)
    assert [len(sample.frames) for sample in samples] == [5, 5, 0]
    assert len({sample.group for sample in samples}) == 2
    assert len({sample.bucket for sample in samples}) == 1


def test_without_num_frames_clips_are_left_alone_and_named_when_there_is_nothing_else(tmp_path):
    make_clips(tmp_path, 2)
    with pytest.raises(DataError, match=r"no pictures in .*; 2 are clips, which are taken where num_frames is above 1"):
        plan(tmp_path, num_frames=1)
    make_pictures(tmp_path / "more", [(64, 64)])
    assert len(plan(tmp_path, num_frames=1)) == 1


def test_repeats_take_the_same_frames_over_the_clip_and_others_at_a_rate(tmp_path):
    make_clip(tmp_path / "clip.mkv", frames=40)
    assert len({sample.frames for sample in plan(tmp_path, num_repeats=6)}) == 1
    at_rate = plan(tmp_path, num_repeats=6, shrink_video_to_frames=False, fps=8)
    assert len({sample.frames for sample in at_rate}) > 2
    assert at_rate == plan(tmp_path, num_repeats=6, shrink_video_to_frames=False, fps=8)


def test_the_cache_key_and_the_digest_follow_the_frames_that_are_taken(tmp_path):
    make_clip(tmp_path / "clip.mkv", frames=40)
    plans = [plan(tmp_path), plan(tmp_path, num_frames=9), plan(tmp_path, shrink_video_to_frames=False, fps=4)]
    assert len({latents_key(samples[0], "vae") for samples in plans}) == 3
    assert len({digest(samples) for samples in plans}) == 3
    assert latents_key(plan(tmp_path)[0], "vae") == latents_key(plans[0][0], "vae")


def test_a_clip_with_too_few_frames_is_reported(tmp_path, caplog):
    make_clip(tmp_path / "clip.mkv", frames=3)
    with caplog.at_level(logging.WARNING):
        plan(tmp_path)
    assert "clip.mkv: has 3 frames, fewer than num_frames: 5" in caplog.text


def test_a_clip_is_decoded_once_to_be_known_and_never_again(tmp_path, monkeypatch):
    make_clips(tmp_path / "data", 2)
    prints = Fingerprints(tmp_path / "memory.json")
    first = plan(tmp_path / "data", prints)
    prints.save()
    monkeypatch.setattr("lora_trainer.data.samples.clip_of", None)
    assert plan(tmp_path / "data", Fingerprints(tmp_path / "memory.json")) == first


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize("arch", ["wan21", "wan22"])
def test_training_on_clips_and_pictures_goes_on_after_a_stop_as_if_there_were_none(arch, tmp_path, tiny_model_folder):
    data = make_clips(tmp_path / "data", 2, size=(64, 64))
    make_pictures(data / "more", [(64, 64)])
    whole = Job(tmp_path / "whole", tiny_model_folder(arch), data, tmp_path / "cache", arch, train={"steps": 6})
    whole.config["datasets"][0] |= {"num_frames": 5, "caption_dropout": 0.3}
    whole.change(sample={"prompts": ["a cube"], "width": 32, "height": 32, "sample_steps": 2, "num_frames": 5})
    broken = whole.copy("broken")
    assert whole.run() == ExitCode.DONE
    assert broken.run(crash_after=2) == 1
    assert broken.run(stop_after=4) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert (
        whole.newest().items()
        >= {name: broken.newest()[name] for name in ("adapter.safetensors", "optimizer.safetensors")}.items()
    )
    files = {item.key for item in whole.store.list("final/")}
    adapters = {"wan21": ["adapter"], "wan22": ["adapter_high_noise", "adapter_low_noise"]}[arch]
    assert {f"final/{name}.safetensors" for name in adapters} <= files
    assert {"final/sample-00.webp", "final/sample-00.png"} <= files
    for name in adapters:
        assert (
            whole.store.get(f"final/{name}.safetensors")[-1000:]
            == broken.store.get(f"final/{name}.safetensors")[-1000:]
        )
