"""One suite for every adapter of the Store: a directory, and a real S3 server."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_api.profile import StoreSpec
from lora_api.store import StoreCredentialsError, StoredObject, StoreError, StoreMissingError
from lora_api.stores import Credentials, DirectoryStore, credentials_from_folder, open_bucket, open_store
from lora_api.stores.s3 import S3Store
from tests.cluster.s3 import SeaweedS3

BUCKET = "contract"
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def seaweed():
    with SeaweedS3(buckets=[BUCKET]) as running:
        yield running


def credentials_of(seaweed):
    return Credentials(seaweed.access_key, seaweed.secret_key)


def s3_store(seaweed, prefix):
    return S3Store.connect(seaweed.endpoint, BUCKET, prefix, region="us-east-1", credentials=credentials_of(seaweed))


@pytest.fixture(params=["directory", "s3"])
def store(request, tmp_path):
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    seaweed = request.getfixturevalue("seaweed")
    return s3_store(seaweed, f"{uuid.uuid4().hex}/")


def keys(store, prefix=""):
    return [item.key for item in store.list(prefix)]


def test_what_was_put_is_what_is_got(store):
    store.put("a/b.json", b"one")
    assert store.get("a/b.json") == b"one"


def test_an_empty_object_is_an_object(store):
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.list() == [StoredObject("empty", 0, store.list()[0].modified_at)]


@pytest.mark.parametrize("size", [0, 3, 11 * MEBIBYTE])
def test_memory_is_put_as_bytes_are(store, size):
    data = bytes(range(256)) * (size // 256 + 1)
    store.put("memory", memoryview(bytearray(data[: size + 1]))[1:])
    assert store.get("memory") == data[1 : size + 1]


def test_putting_again_replaces(store):
    store.put("progress.json", b"a long first value")
    store.put("progress.json", b"short")
    assert store.get("progress.json") == b"short"
    assert keys(store) == ["progress.json"]


@pytest.mark.parametrize("key", ["absent", "absent/deeper", "a", "a/b.json/c"])
def test_an_absent_key_is_none_and_not_an_error(store, tmp_path, key):
    store.put("a/b.json", b"x")
    assert store.get(key) is None
    assert store.fetch(key, tmp_path / "target") is False
    assert not (tmp_path / "target").exists()


def test_a_store_that_was_never_written_to_is_empty(store):
    assert store.list() == []
    assert store.list("checkpoints/") == []
    assert store.get("run.json") is None
    store.delete(["run.json"])


@pytest.mark.parametrize("size", [0, 1, 6 * MEBIBYTE + 1])
def test_files_go_in_and_come_out_whole(store, tmp_path, size):
    source, target = tmp_path / "source.bin", tmp_path / "new" / "folder" / "target.bin"
    source.write_bytes(bytes(index % 251 for index in range(size)))
    store.put("checkpoints/adapter.safetensors", source)
    assert store.fetch("checkpoints/adapter.safetensors", target) is True
    assert target.read_bytes() == source.read_bytes()
    assert [item.size_bytes for item in store.list()] == [size]


def test_fetching_replaces_a_file_that_is_there(store, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"something much longer than the object")
    store.put("key", b"object")
    store.fetch("key", target)
    assert target.read_bytes() == b"object"


def test_a_file_that_is_not_there_cannot_be_put(store, tmp_path):
    with pytest.raises(StoreError):
        store.put("key", tmp_path / "absent")
    assert store.list() == []


def test_listing_is_sorted_whole_and_with_sizes(store):
    for key, size in (("b", 1), ("a/2", 2), ("a/10", 3), ("a-b", 4), ("a/1/x", 5)):
        store.put(key, b"x" * size)
    assert [(item.key, item.size_bytes) for item in store.list()] == [
        ("a-b", 4),
        ("a/1/x", 5),
        ("a/10", 3),
        ("a/2", 2),
        ("b", 1),
    ]


@pytest.mark.parametrize(
    ("prefix", "found"),
    [
        ("", ["lora-2/run.json", "lora/a/b", "lora/run.json"]),
        ("lora/", ["lora/a/b", "lora/run.json"]),
        ("lora", ["lora-2/run.json", "lora/a/b", "lora/run.json"]),
        ("lora/r", ["lora/run.json"]),
        ("lora/run.json", ["lora/run.json"]),
        ("lora/a", ["lora/a/b"]),
        ("nothing/", []),
        ("lora/run.json/", []),
    ],
)
def test_a_prefix_is_the_beginning_of_a_key(store, prefix, found):
    for key in ("lora/run.json", "lora/a/b", "lora-2/run.json"):
        store.put(key, b"x")
    assert keys(store, prefix) == found


def test_times_are_by_the_clock(store, tmp_path):
    store.put("key", b"x")
    (tmp_path / "now").touch()
    assert abs(store.list()[0].modified_at - (tmp_path / "now").stat().st_mtime) < 60


def test_exactly_the_named_keys_are_deleted(store):
    for key in ("lora/a", "lora/ab", "lora-2/a", "lora"):
        if key != "lora" or isinstance(store, S3Store):
            store.put(key, b"x")
    store.delete(["lora/a", "absent", "absent/too"])
    assert "lora/a" not in keys(store)
    assert {"lora/ab", "lora-2/a"} <= set(keys(store))


def test_deleting_nothing_deletes_nothing(store):
    store.put("key", b"x")
    store.delete([])
    assert keys(store) == ["key"]


def test_a_deleted_key_can_be_put_again(store):
    store.put("a/b/c", b"old")
    store.delete(["a/b/c"])
    assert store.list() == []
    store.put("a/b/c", b"new")
    assert store.get("a/b/c") == b"new"


def test_more_keys_than_one_request_takes_are_listed_and_deleted(store):
    names = [f"many/{number:04d}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert keys(store, "many/") == names
    store.delete(names)
    assert store.list() == []


@pytest.mark.parametrize(
    "key", ["with space.txt", "plus+percent%20&.txt", "größe/😀.txt", "a=b,c;d@e.txt", "dots..in.name", "-dash"]
)
def test_keys_are_taken_as_they_are(store, tmp_path, key):
    store.put(key, b"x")
    assert keys(store) == [key]
    assert store.get(key) == b"x"
    assert store.fetch(key, tmp_path / "target")
    store.delete([key])
    assert store.list() == []


def test_a_sub_store_sees_only_what_lies_below_its_prefix(store):
    lora = store.sub("runs/lora")
    lora.put("run.json", b"1")
    store.put("runs/lora-2/run.json", b"2")
    store.put("runs/loose", b"3")
    assert keys(lora) == ["run.json"]
    assert lora.get("run.json") == store.get("runs/lora/run.json") == b"1"
    lora.delete(["run.json", "loose"])
    assert keys(store) == ["runs/loose", "runs/lora-2/run.json"]


@pytest.mark.parametrize("prefix", ["a/b", "a/b/"])
def test_a_slash_at_the_end_of_a_prefix_does_not_matter(store, prefix):
    store.sub(prefix).put("c", b"x")
    assert keys(store) == ["a/b/c"]
    assert keys(store.sub("a").sub("b")) == ["c"]


def test_the_location_tells_a_person_where_it_is(store):
    assert store.sub("team/mascot").location.rstrip("/").endswith("/team/mascot")


def test_readers_see_the_old_value_or_the_new_one_and_never_a_part(store):
    values = [bytes([65 + index]) * (200_000 + index) for index in range(4)]
    store.put("progress.json", values[0])

    def write(index):
        for _ in range(5):
            store.put("progress.json", values[index])

    def read(_):
        return [store.get("progress.json") for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        writers = [pool.submit(write, index) for index in range(4)]
        seen = [value for future in [pool.submit(read, n) for n in range(4)] for value in future.result()]
        for writer in writers:
            writer.result()
    assert all(value in values for value in seen)
    assert keys(store) == ["progress.json"]


def unreachable_spec(**more):
    return StoreSpec(name="default", endpoint="http://127.0.0.1:9", bucket="runs", **more)


def test_a_bucket_that_does_not_exist_is_missing_and_not_empty(seaweed):
    store = S3Store.connect(
        seaweed.endpoint, "no-such-bucket", "", region="us-east-1", credentials=credentials_of(seaweed)
    )
    for verb in (store.list, lambda: store.put("a", b"x"), lambda: store.get("a")):
        with pytest.raises(StoreMissingError, match="no-such-bucket"):
            verb()


@pytest.mark.parametrize("wrong", [("nobody", "secret"), (None, "wrong-secret")])
def test_refused_credentials_are_told_apart_from_a_server_that_is_away(seaweed, wrong):
    access_key, secret_key = wrong
    credentials = Credentials(access_key or seaweed.access_key, secret_key)
    store = S3Store.connect(seaweed.endpoint, BUCKET, "", region="us-east-1", credentials=credentials)
    for verb in (store.list, lambda: store.put("a", b"x"), lambda: store.get("a")):
        with pytest.raises(StoreCredentialsError) as caught:
            verb()
        assert secret_key not in str(caught.value)


def test_a_server_that_is_away_is_an_error_in_bounded_time_that_names_place_and_operation():
    store = open_store(unreachable_spec(prefix="lora"), Credentials("key", "hidden-value"))
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"get s3://runs/lora/run\.json at http://127\.0\.0\.1:9") as caught:
        store.get("run.json")
    assert not isinstance(caught.value, StoreCredentialsError | StoreMissingError)
    assert time.monotonic() - begun < 30
    assert "hidden-value" not in str(caught.value)


def test_a_server_that_comes_back_is_used_again():
    with SeaweedS3(buckets=[BUCKET]) as first:
        store = s3_store(first, "")
        store.put("a", b"x")
        port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(StoreError):
        store.get("a")
    with SeaweedS3(buckets=[BUCKET], port=port):
        assert store.get("a") is None
        store.put("a", b"y")
        assert store.get("a") == b"y"


def test_a_profile_opens_the_store_it_describes(seaweed, tmp_path):
    s3 = StoreSpec(name="default", endpoint=seaweed.endpoint, bucket=BUCKET, prefix="team/runs")
    opened = open_store(s3, credentials_of(seaweed))
    assert opened.location == f"s3://{BUCKET}/team/runs/"
    opened.put("a", b"x")
    assert open_bucket(s3, BUCKET, "team/", credentials_of(seaweed)).get("runs/a") == b"x"
    local = open_store(StoreSpec(name="default", type="directory", directory=str(tmp_path), prefix="runs"))
    assert local.location == str(tmp_path / "runs")


def test_an_s3_store_without_credentials_is_refused_at_once():
    with pytest.raises(StoreCredentialsError, match=r"'default'.*no credentials"):
        open_store(unreachable_spec())


def test_credentials_are_read_from_a_mounted_secret_and_never_shown(tmp_path):
    (tmp_path / "accessKey").write_text("key\n")
    with pytest.raises(StoreCredentialsError, match="secretKey: missing or empty"):
        credentials_from_folder(tmp_path)
    (tmp_path / "secretKey").write_text("")
    with pytest.raises(StoreCredentialsError, match="secretKey: missing or empty"):
        credentials_from_folder(tmp_path)
    (tmp_path / "secretKey").write_text("hidden-value\n")
    credentials = credentials_from_folder(Path(tmp_path))
    assert (credentials.access_key, credentials.secret_key) == ("key", "hidden-value")
    assert "hidden-value" not in repr(credentials)
