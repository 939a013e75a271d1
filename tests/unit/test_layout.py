"""Keys of the run directory: spelled once, sorted by number, never leaving their prefix."""

from __future__ import annotations

import pytest

from lora_api import layout


def test_keys_of_the_contract():
    assert layout.start_claim(1) == "starts/000001.json"
    assert layout.metrics(12) == "metrics/000012.jsonl"
    assert layout.checkpoint_folder(900, 1) == "checkpoints/step-000000900/000001/"
    assert layout.checkpoint_manifest(900, 1) == "checkpoints/step-000000900/000001/manifest.json"
    assert layout.samples_folder(900) == "samples/step-000000900/"
    assert layout.FINAL_MANIFEST == "final/manifest.json"


@pytest.mark.parametrize(
    "key_of", [layout.start_claim, layout.metrics, layout.samples_folder, lambda n: layout.checkpoint_folder(n, 1)]
)
def test_keys_sort_as_their_numbers(key_of):
    numbers = [1, 2, 9, 10, 99, 100, 999_999]
    assert sorted(map(key_of, numbers[::-1])) == list(map(key_of, numbers))


@pytest.mark.parametrize(
    ("key", "is_one"),
    [
        ("checkpoints/step-000000900/000001/manifest.json", True),
        ("checkpoints/manifest.json", True),
        ("final/manifest.json", False),
        ("checkpoints/step-000000900/000001/manifest.json.tmp", False),
        ("checkpoints/step-000000900/000001/not-manifest.json", False),
        ("other/checkpoints/step-000000900/000001/manifest.json", False),
    ],
)
def test_a_checkpoint_is_committed_by_its_manifest_only(key, is_one):
    assert layout.is_checkpoint_manifest(key) is is_one


@pytest.mark.parametrize(
    ("store_prefix", "path", "prefix"),
    [
        ("", "lora", "lora/"),
        ("runs", "team/lora", "runs/team/lora/"),
        ("/runs/", "/lora/", "runs/lora/"),
        ("a/b", "c", "a/b/c/"),
    ],
)
def test_a_run_prefix_ends_in_one_slash(store_prefix, path, prefix):
    assert layout.run_prefix(store_prefix, path) == prefix


def test_one_job_never_covers_another_whose_name_begins_alike():
    assert not layout.run_prefix("runs", "lora-2").startswith(layout.run_prefix("runs", "lora"))
