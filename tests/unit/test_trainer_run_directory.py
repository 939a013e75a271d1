"""Claims, commits and resuming, on a directory: who may write, and what can be trusted."""

from __future__ import annotations

import json

import pytest

from lora_api import layout
from lora_api.run import CheckpointManifest, Progress, RunConfig, config_hash
from lora_api.store import StoreCredentialsError, StoreError
from lora_api.stores import DirectoryStore
from lora_trainer import checkpoint
from lora_trainer.beginning import begin, lost_steps
from lora_trainer.errors import CheckpointIntegrityError, ConfigurationError, FencedError, TransientError
from lora_trainer.fence import Fence, newest_start
from lora_trainer.retry import RetryingStore

FILES = {checkpoint.ADAPTER: b"adapter", checkpoint.OPTIMIZER: b"optimizer", checkpoint.STATE: b"{}"}


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "run")


def run_config(uid="u1", **changes) -> RunConfig:
    config = {"model": {"arch": "zimage", "name_or_path": "/m"}, "datasets": [{"folder_path": "/d"}]}
    document = {
        "jobName": "mascot",
        "namespace": "team-a",
        "uid": uid,
        "attempt": 1,
        "config": config | changes.pop("config", {}),
        "store": {"name": "disk", "type": "directory", "directory": "/runs"},
        "path": "p",
    }
    return RunConfig.model_validate(document | changes)


def commit(store, fence, step, run=None, files=None):
    run = run or run_config()
    return checkpoint.commit(store, fence, files or FILES, step=step, uid=run.uid, config_hash=config_hash(run.config))


# ---------------------------------------------------------------------- the fence
def test_starts_are_numbered_from_one_and_the_newest_may_write(store):
    first = Fence.raise_up(store, attempt=1)
    assert first.claim.start == 1
    first.check()
    second = Fence.raise_up(store, attempt=2)
    assert newest_start(store) == second.claim.start == 2
    second.check()
    with pytest.raises(FencedError, match=r"start 2 has taken over .* start 1 \(attempt 1\) writes nothing more"):
        first.check()


def test_a_newer_start_fences_the_older_before_its_commit(store):
    old = Fence.raise_up(store, attempt=1)
    Fence.raise_up(store, attempt=1)
    with pytest.raises(FencedError):
        commit(store, old, 10)
    assert not [item.key for item in store.list() if layout.is_checkpoint_manifest(item.key)]


class Rivals(DirectoryStore):
    """Another process claims the same number right after we did, a few times."""

    def __init__(self, root, times):
        super().__init__(root)
        self.times = times

    def put(self, key, data):
        super().put(key, data)
        if key.startswith(layout.STARTS) and self.times:
            self.times -= 1
            super().put(key, data.replace(json.loads(data)["token"].encode(), b"rival"))


def test_of_two_claimants_of_one_number_one_moves_on(tmp_path):
    fence = Fence.raise_up(Rivals(tmp_path, times=2), attempt=1)
    assert fence.claim.start == 3
    fence.check()


def test_claiming_does_not_go_on_for_ever(tmp_path):
    with pytest.raises(TransientError, match="others kept coming first"):
        Fence.raise_up(Rivals(tmp_path, times=1000), attempt=1)


# ---------------------------------------------------------------------- commits and trust
def test_the_manifest_is_written_last(tmp_path):
    keys = []

    class Recording(DirectoryStore):
        def put(self, key, data):
            keys.append(key)
            super().put(key, data)

    store = Recording(tmp_path)
    commit(store, Fence.raise_up(store, 1), 10)
    assert keys[-1] == layout.checkpoint_manifest(10, 1)


def test_the_newest_step_is_taken_and_of_one_step_the_newer_start(store):
    for step in (10, 20):
        commit(store, Fence.raise_up(store, 1), step)
    commit(store, Fence.raise_up(store, 1), 20, files=FILES | {checkpoint.STATE: b'{"start": 3}'})
    found, rejected = checkpoint.newest(store)
    assert (found.manifest.step, found.manifest.start) == (20, 3)
    assert found.files[checkpoint.STATE] == b'{"start": 3}'
    assert rejected == ()


def test_leftovers_without_a_manifest_do_not_exist(store):
    commit(store, Fence.raise_up(store, 1), 10)
    store.put(layout.checkpoint_folder(20, 2) + checkpoint.ADAPTER, b"half")
    assert checkpoint.newest(store)[0].manifest.step == 10


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda store, folder: store.put(folder + checkpoint.OPTIMIZER, b"optim"), "has 5 bytes, 9 were committed"),
        (lambda store, folder: store.put(folder + checkpoint.ADAPTER, b"ADAPTER"), "committed sha256"),
        (lambda store, folder: store.delete([folder + checkpoint.STATE]), "state.json is missing"),
        (lambda store, folder: store.put(folder + layout.MANIFEST, b"{"), "manifest is not readable"),
    ],
)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_taken(store, damage, reason):
    fence = Fence.raise_up(store, 1)
    commit(store, fence, 10)
    commit(store, fence, 20)
    damage(store, layout.checkpoint_folder(20, 1))
    found, rejected = checkpoint.newest(store)
    assert found.manifest.step == 10
    assert [item.key for item in rejected] == [layout.checkpoint_manifest(20, 1)]
    assert reason in rejected[0].reason


def test_when_none_can_be_trusted_it_says_which_and_does_not_begin_again(store):
    fence = Fence.raise_up(store, 1)
    for step in (10, 20):
        commit(store, fence, step)
        store.put(layout.checkpoint_folder(step, 1) + checkpoint.ADAPTER, b"")
    with pytest.raises(CheckpointIntegrityError, match=r"none of 2 .*step-000000020.*step-000000010"):
        checkpoint.newest(store)


def test_a_manifest_that_leaves_a_file_out_is_not_trusted(store):
    fence = Fence.raise_up(store, 1)
    checkpoint.commit(store, fence, {checkpoint.ADAPTER: b"x"}, step=5, uid="u1", config_hash="h")
    with pytest.raises(CheckpointIntegrityError, match=r"does not name optimizer\.safetensors, state\.json"):
        checkpoint.newest(store)


# ---------------------------------------------------------------------- beginning
def test_the_first_start_makes_the_directory_its_own(store):
    beginning, fence, newest = begin(store, run_config())
    assert (beginning.step, beginning.start, newest) == (0, 1, None)
    assert json.loads(store.get(layout.RUN_FILE))["uid"] == "u1"
    fence.check()


def test_another_job_s_directory_is_refused_before_anything_is_claimed(store):
    begin(store, run_config("u1"))
    with pytest.raises(ConfigurationError, match=r"output\.path: .* belongs to team-a/mascot \(uid u1\)"):
        begin(store, run_config("u2"))
    assert newest_start(store) == 1


def test_another_job_s_directory_is_continued_when_asked_to(store):
    _, fence, _ = begin(store, run_config("u1"))
    commit(store, fence, 10)
    beginning, _, newest = begin(store, run_config("u2", ifExists="Continue"))
    assert beginning.step == newest.manifest.step == 10
    assert json.loads(store.get(layout.RUN_FILE))["uid"] == "u2"
    with pytest.raises(ConfigurationError):
        begin(store, run_config("u1"))


def test_a_checkpoint_of_another_configuration_is_refused(store):
    _, fence, _ = begin(store, run_config())
    commit(store, fence, 10)
    with pytest.raises(ConfigurationError, match="the checkpoint of step 10 was made with another configuration"):
        begin(store, run_config(config={"train": {"seed": 7}}))
    begin(store, run_config(config={"train": {"steps": 7, "lr": 1e-3}, "save": {"save_every": 3}}))


def test_a_finished_job_is_left_alone(store):
    final = {"step": 9, "start": 1, "uid": "u1", "configHash": "h", "completedAt": "t", "adapter": "a"}
    store.put(layout.FINAL_MANIFEST, json.dumps(final).encode())
    beginning, fence, _ = begin(store, run_config())
    assert beginning.finished_step == 9
    assert fence is None
    assert newest_start(store) == 0


def test_control_json_decides_the_settings_from_the_start(store):
    control = {
        "generation": 4,
        "steps": 77,
        "lr": 0.5,
        "saveEvery": 3,
        "maxStepSaves": 2,
        "sample": {"sample_every": 5},
    }
    store.put(layout.CONTROL, json.dumps(control).encode())
    settings = begin(store, run_config())[0].settings
    assert (settings.generation, settings.steps, settings.lr, settings.save_every) == (4, 77, 0.5, 3)
    assert settings.sample.sample_every == 5


def progress(step, lost):
    return Progress(start=1, attempt=1, stage="Training", step=step, steps=100, lost_steps=lost, updated_at="t")


def test_lost_steps_add_up_over_starts(store):
    assert lost_steps(None, 0) == 0
    assert lost_steps(progress(25, 3), 20) == 8
    assert lost_steps(progress(20, 3), 20) == 3
    _, fence, _ = begin(store, run_config())
    commit(store, fence, 20)
    store.put(layout.PROGRESS, progress(25, 3).model_dump_json(by_alias=True).encode())
    assert begin(store, run_config())[0].lost_steps == 8


# ---------------------------------------------------------------------- retries
class Flaky(DirectoryStore):
    def __init__(self, root, failures, kind=StoreError):
        super().__init__(root)
        self.failures, self.kind = failures, kind

    def get(self, key):
        if self.failures:
            self.failures -= 1
            raise self.kind("away")
        return super().get(key)


def test_a_store_that_is_away_for_a_moment_is_asked_again(tmp_path):
    slept = []
    assert RetryingStore(Flaky(tmp_path, 2), (1, 2, 4), slept.append).get("k") is None
    assert slept == [1, 2]


def test_a_store_that_stays_away_is_an_error_after_a_bounded_time(tmp_path):
    slept = []
    with pytest.raises(StoreError, match="away"):
        RetryingStore(Flaky(tmp_path, 99), (1, 2, 4), slept.append).get("k")
    assert slept == [1, 2, 4]


def test_refused_credentials_are_not_tried_again(tmp_path):
    slept = []
    with pytest.raises(StoreCredentialsError):
        RetryingStore(Flaky(tmp_path, 99, StoreCredentialsError), (1, 2), slept.append).get("k")
    assert slept == []


def test_manifests_on_the_wire_have_the_contract_s_keys(store):
    commit(store, Fence.raise_up(store, 3), 10)
    wire = json.loads(store.get(layout.checkpoint_manifest(10, 1)))
    assert set(wire) == {"step", "start", "attempt", "uid", "configHash", "committedAt", "files", "saveSeconds"}
    assert CheckpointManifest.model_validate(wire).size_bytes == 18
