"""What a directory does beyond the contract of every store (tests/contract/test_store.py)."""

from __future__ import annotations

import os

import pytest

from lora_api.store import StoreError
from lora_api.stores import DirectoryStore


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/outside", "a/.."])
def test_no_key_leaves_the_store(store, tmp_path, key):
    for verb in (
        lambda: store.put(key, b"x"),
        lambda: store.get(key),
        lambda: store.fetch(key, tmp_path / "target"),
        lambda: store.delete([key]),
        lambda: store.sub(key),
    ):
        with pytest.raises(ValueError, match="leaves the store"):
            verb()
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_write_that_did_not_finish_is_never_listed(store, tmp_path):
    store.put("a/b", b"x")
    (tmp_path / "store" / "a" / ".partial-123").write_bytes(b"half")
    assert [item.key for item in store.list()] == ["a/b"]


def test_a_write_that_fails_leaves_the_old_value_and_no_remains(store, tmp_path, monkeypatch):
    store.put("key", b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        store.put("key", b"new")
    assert store.get("key") == b"old"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["key"]


def test_folders_that_became_empty_go_and_others_stay(store, tmp_path):
    store.put("checkpoints/a/1", b"x")
    store.put("checkpoints/b/1", b"x")
    store.delete(["checkpoints/a/1"])
    assert [path.name for path in (tmp_path / "store" / "checkpoints").iterdir()] == ["b"]
    store.delete(["checkpoints/b/1"])
    assert list((tmp_path / "store").iterdir()) == []


def test_a_folder_is_never_deleted_as_if_it_were_a_key(store):
    store.put("a/b", b"x")
    with pytest.raises(StoreError):
        store.delete(["a"])
    assert store.get("a/b") == b"x"


def test_a_file_in_the_way_of_a_folder_is_an_error_that_names_the_path(store):
    store.put("a", b"x")
    with pytest.raises(StoreError, match="a/b: can't be written"):
        store.put("a/b", b"y")


def test_files_are_as_readable_as_the_users_other_files(tmp_path):
    mask = os.umask(0o022)
    try:
        DirectoryStore(tmp_path).put("final/adapter.safetensors", b"x")
    finally:
        os.umask(mask)
    assert (tmp_path / "final/adapter.safetensors").stat().st_mode & 0o777 == 0o644
