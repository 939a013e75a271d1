"""Pictures and captions on disk: what is found, what is read, and what is said about what can't be."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lora_api.datasets import DatasetConfig
from lora_api.run import RunConfig
from lora_trainer.data.buckets import Size
from lora_trainer.data.captions import fill_trigger, read_caption, with_trigger
from lora_trainer.data.images import load, size_of
from lora_trainer.data.locations import mirror, split_uri, store_of
from lora_trainer.data.samples import Fingerprints, digest, plan_samples
from lora_trainer.data.scan import scan
from lora_trainer.errors import ConfigurationError, DataError


def picture(path: Path, size=(64, 48), colour=(200, 10, 10), mode="RGB", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)
    return path


# ---------------------------------------------------------------------- finding
def test_pictures_are_found_recursively_whatever_the_case_of_their_ending(tmp_path):
    for name in ("b.PNG", "a.jpg", "deep/er/c.WebP", "d.JPEG", ".hidden.png", ".cache/e.png", "notes.txt"):
        path = tmp_path / name
        if path.suffix == ".txt":
            path.write_text("no picture")
        else:
            picture(path)
    names = [found.path.relative_to(tmp_path).as_posix() for found in scan(tmp_path, "txt", "field")]
    assert names == ["a.jpg", "b.PNG", "d.JPEG", "deep/er/c.WebP"]


def test_captions_stand_beside_or_in_a_folder_of_their_own(tmp_path):
    picture(tmp_path / "images/x/one.png")
    picture(tmp_path / "images/two.png")
    (tmp_path / "captions/x").mkdir(parents=True)
    (tmp_path / "captions/x/one.txt").write_text("apart")
    (tmp_path / "images/two.txt").write_text("beside")
    two, one = scan(tmp_path, ".txt", "field")
    assert read_caption(one.caption, "") == "apart"
    assert read_caption(two.caption, "") == "beside"


def test_a_missing_folder_and_an_empty_one_name_the_field(tmp_path):
    with pytest.raises(DataError, match=r"config\.datasets\[0\].*nowhere is not a folder"):
        scan(tmp_path / "nowhere", "txt", "config.datasets[0].folder_path")
    (tmp_path / "a.gif").write_bytes(b"")
    with pytest.raises(DataError, match=r"no pictures in .*: 1 other files"):
        scan(tmp_path, "txt", "config.datasets[0].folder_path")


# ---------------------------------------------------------------------- captions
def test_a_byte_order_mark_and_white_space_are_taken_off(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf  ein B\xc3\xa4r \r\n")
    assert read_caption(file, "") == "ein Bär"


def test_a_blank_caption_means_the_default_one(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    assert read_caption(tmp_path / "a.txt", "a toy") == "a toy"
    assert read_caption(None, "a toy") == "a toy"


@pytest.mark.parametrize(("raw", "offset"), [(b"abc\xff", 3), (b"\xef\xbb\xbfabc\xe4 ", 6)])
def test_a_caption_that_is_not_utf8_names_the_file_and_the_byte(tmp_path, raw, offset):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(DataError, match=rf"a\.txt: the caption is not UTF-8: byte {offset} is 0x"):
        read_caption(tmp_path / "a.txt", "")


@pytest.mark.parametrize(
    ("text", "trigger", "expected"),
    [
        ("a dog", "sks", "sks, a dog"),
        ("a sks dog", "sks", "a sks dog"),
        ("a [trigger] dog", "sks", "a sks dog"),
        ("", "sks", "sks"),
        ("a dog", None, "a dog"),
        ("a [trigger] dog", None, "a  dog"),
    ],
)
def test_the_trigger_word_is_put_in_front_unless_it_is_there(text, trigger, expected):
    assert with_trigger(text, trigger) == expected


def test_prompts_only_have_the_mark_replaced():
    assert fill_trigger("a dog", "sks") == "a dog"
    assert fill_trigger("[trigger] on a table", "sks") == "sks on a table"


# ---------------------------------------------------------------------- pixels
def test_the_exif_rotation_counts_for_size_and_pixels(tmp_path):
    image = Image.new("RGB", (64, 32), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif, quality=100)
    assert size_of(tmp_path / "a.jpg") == Size(32, 64)
    upright = load(tmp_path / "a.jpg", Size(32, 64))
    assert upright.size == (32, 64)
    red, _, blue = upright.getpixel((16, 8))
    assert blue > red


def test_transparency_is_laid_on_white(tmp_path):
    picture(tmp_path / "a.png", mode="RGBA", colour=(0, 0, 0, 0))
    assert load(tmp_path / "a.png", Size(64, 48)).getpixel((5, 5)) == (255, 255, 255)


def test_a_palette_with_transparency_is_laid_on_white_too(tmp_path):
    Image.new("P", (32, 32), 0).save(tmp_path / "a.png", transparency=0)
    assert load(tmp_path / "a.png", Size(32, 32)).getpixel((5, 5)) == (255, 255, 255)


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path):
    Image.new("I;16", (32, 32), 32768).save(tmp_path / "a.png")
    assert load(tmp_path / "a.png", Size(32, 32)).getpixel((5, 5)) == (128, 128, 128)


@pytest.mark.parametrize("mode", ["L", "LA", "CMYK", "1"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    Image.new(mode, (32, 32)).save(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"))
    assert load(next(tmp_path.iterdir()), Size(32, 32)).mode == "RGB"


def test_a_file_that_is_no_picture_or_cut_short_is_named(tmp_path):
    (tmp_path / "a.png").write_text("hello")
    with pytest.raises(DataError, match=r"a\.png: not a readable picture"):
        size_of(tmp_path / "a.png")
    whole = picture(tmp_path / "b.png", size=(256, 256)).read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"b\.png: not a readable picture"):
        load(tmp_path / "b.png", Size(256, 256))


# ---------------------------------------------------------------------- the plan
def plan(folder, **options):
    config = DatasetConfig(folder_path=str(folder), **options)
    return plan_samples([(folder, config)], trigger="sks", multiple=16, prints=Fingerprints(None))


def test_each_resolution_adds_a_copy_and_repeats_multiply(tmp_path):
    picture(tmp_path / "a.png", size=(128, 128))
    samples = plan(tmp_path, resolution=(32, 64), num_repeats=3)
    assert sorted(str(sample.bucket) for sample in samples) == ["32x32"] * 3 + ["64x64"] * 3


def test_a_dropped_caption_keeps_the_trigger_word(tmp_path):
    picture(tmp_path / "a.png")
    (sample,) = plan(tmp_path, default_caption="a dog")
    assert (sample.caption, sample.dropped_caption) == ("sks, a dog", "sks")


def test_a_picture_too_small_for_one_bucket_is_named(tmp_path):
    picture(tmp_path / "tiny.png", size=(10, 10))
    with pytest.raises(DataError, match=r"tiny\.png: the picture is too small: 10x10 pixels; at least 16x16"):
        plan(tmp_path)


def test_the_digest_changes_with_a_picture_and_with_a_caption(tmp_path):
    picture(tmp_path / "a.png")
    first = digest(plan(tmp_path))
    (tmp_path / "a.txt").write_text("a cat")
    second = digest(plan(tmp_path))
    picture(tmp_path / "a.png", colour=(0, 0, 9))
    assert len({first, second, digest(plan(tmp_path))}) == 3


def test_fingerprints_are_remembered_outside_the_dataset_and_follow_changes(tmp_path):
    file = picture(tmp_path / "data/a.png")
    memory = tmp_path / "cache/prints.json"
    first = Fingerprints(memory)
    before = first.of(file)
    first.save()
    assert Fingerprints(memory).of(file) == before
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a.png"]
    picture(file, size=(64, 49))
    assert Fingerprints(memory).of(file) != before


# ---------------------------------------------------------------------- locations
def run_config(store, *others) -> RunConfig:
    config = {"model": {"arch": "zimage", "name_or_path": "/m"}, "datasets": [{"folder_path": "/d"}]}
    return RunConfig.model_validate(
        {"jobName": "j", "namespace": "n", "uid": "u", "attempt": 1, "config": config, "store": store, "path": "p"}
        | {"stores": others}
    )


S3 = {"name": "runs", "type": "s3", "endpoint": "http://s3:9000", "bucket": "runs"}
MODELS = {"name": "models", "type": "s3", "endpoint": "http://other:9000", "bucket": "models"}
DIRECTORY = {"name": "disk", "type": "directory", "directory": "/runs"}


def test_an_s3_location_is_reached_through_the_store_with_its_bucket_else_the_job_s_own():
    run = run_config(S3, S3, MODELS)
    assert store_of("models", run, "f").endpoint == "http://other:9000"
    assert store_of("runs", run, "f").endpoint == "http://s3:9000"
    assert store_of("datasets", run, "f").name == "runs"


def test_an_s3_location_without_any_s3_store_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match=r"config\.x: no store of the profile has the bucket 'models'"):
        store_of("models", run_config(DIRECTORY), "config.x")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("s3://b/a/c", ("b", "a/c/")), ("s3://b/a/", ("b", "a/")), ("s3://b", ("b", "")), ("s3://b/", ("b", ""))],
)
def test_locations_are_split_so_that_a_prefix_never_covers_its_neighbour(uri, expected):
    assert split_uri(uri) == expected


def test_a_mirror_equals_its_source_and_fetches_only_what_changed(tmp_path):
    from lora_api.stores import DirectoryStore

    source, copy, said = DirectoryStore(tmp_path / "source"), tmp_path / "copy", []
    source.put("a/x.png", b"one")
    source.put("y.txt", b"two")
    assert mirror(source, copy, said.append) == 2
    assert len(said) == 2
    assert mirror(source, copy, said.append) == 2
    assert len(said) == 2
    source.put("y.txt", b"three")
    source.delete(["a/x.png"])
    (copy / ".part-other").mkdir()
    assert mirror(source, copy, said.append) == 1
    assert {path.name: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == {"y.txt": b"three"}
