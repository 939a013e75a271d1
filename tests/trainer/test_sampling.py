"""Sample pictures."""

from __future__ import annotations

import pytest
from PIL import Image

from lora_trainer.sampling import draw_samples, save_png

SIZE = {"width": 48, "height": 32, "steps": 2, "guidance_scale": 4.0}


@pytest.fixture
def drawn(arch, load_tiny, tmp_path):
    model = load_tiny(arch)
    conditions = [model.encode_text(prompt) for prompt in ("a red cube", "a green ball")]
    negative = model.encode_text("")
    model.free_encoders()
    return model, conditions, negative, draw_samples(model, conditions, negative, tmp_path / "samples", **SIZE, seed=3)


def test_each_prompt_gets_one_picture_of_the_asked_size(drawn):
    *_, paths = drawn
    assert [path.name for path in paths] == ["00.png", "01.png"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["00.png", "01.png"]
    for path in paths:
        with Image.open(path) as picture:
            assert picture.size == (48, 32)
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_the_same_seed_draws_the_same_bytes_and_another_does_not(drawn, tmp_path):
    model, conditions, negative, paths = drawn
    calls = []
    again = draw_samples(model, conditions, negative, tmp_path / "again", **SIZE, seed=3, on_drawn=calls.append)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]
    assert calls == [1, 2]
    shifted = draw_samples(model, conditions[1:], negative, tmp_path / "shifted", **SIZE, seed=4)
    assert shifted[0].read_bytes() == paths[1].read_bytes(), "the n-th picture takes seed + n"
    other = draw_samples(model, conditions[:1], negative, tmp_path / "other", **SIZE, seed=9)
    assert other[0].read_bytes() != paths[0].read_bytes()


def test_guidance_changes_the_picture_and_no_negative_means_none(drawn, tmp_path):
    model, conditions, negative, paths = drawn
    plain = draw_samples(model, conditions[:1], None, tmp_path / "plain", **SIZE, seed=3)[0]
    assert plain.read_bytes() != paths[0].read_bytes()
    off = 0.0 if type(model).__name__ == "ZImageModel" else 1.0
    unguided = draw_samples(
        model, conditions[:1], negative, tmp_path / "off", **{**SIZE, "guidance_scale": off}, seed=3
    )[0]
    assert unguided.read_bytes() == plain.read_bytes()


def test_a_size_that_is_no_multiple_of_sixteen_is_refused(arch, load_tiny, tmp_path):
    model = load_tiny(arch)
    with pytest.raises(ValueError, match="sample size 40 x 32: both must be multiples of 16 pixels"):
        draw_samples(model, [model.encode_text("")], None, tmp_path, **{**SIZE, "width": 40}, seed=0)


def test_a_picture_that_can_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_png(Image.new("RGB", (16, 16)), tmp_path / "00.png")
    assert not list(tmp_path.iterdir())
