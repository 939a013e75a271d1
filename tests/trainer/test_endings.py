"""Every ending has its exit code and its sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.store import StoreError
from lora_api.stores import DirectoryStore
from lora_trainer import endings
from lora_trainer.errors import FencedError
from lora_trainer.stopping import Stopped
from tests.trainer.jobs import Job, make_pictures


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache):
    return Job(tmp_path / "job", tiny_model_folder("zimage"), data, cache, train={"steps": 2})


def end(job: Job, **options: Any) -> tuple[int, str]:
    code = job.run(**options)
    word = job.word()
    assert word.code == code
    return code, word.message


# ---------------------------------------------------------------------- done
def test_a_finished_run_has_everything_in_its_directory(job):
    job.change(
        trigger_word="sks",
        train={"steps": 4},
        save={"save_every": 2},
        sample={"prompts": ["a [trigger]", "b"], "width": 32, "height": 32, "sample_steps": 1, "sample_every": 2},
    )
    assert end(job) == (0, "finished at step 4")
    keys = {item.key for item in job.store.list()}
    final = json.loads(job.store.get(layout.FINAL_MANIFEST))
    assert {layout.FINAL + file["name"] for file in final["files"]} | {layout.FINAL_MANIFEST} == {
        key for key in keys if key.startswith(layout.FINAL)
    }
    assert final["samples"] == ["sample-00.png", "sample-01.png"]
    assert {key for key in keys if key.startswith(layout.SAMPLES)} == {
        layout.samples_folder(2) + name for name in ("00.png", "01.png")
    }
    assert job.steps() == [2, 4]
    progress = job.progress()
    assert (progress.stage, progress.step, progress.exit.code) == ("Finalizing", 4, 0)
    assert progress.save_seconds > 0
    lines = job.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert set(lines[1]) == {"step", "loss", "lr", "grad_norm", "seconds", "samples"}
    assert {"importing libraries", "loading the base model", "encoding", "Training"} <= set(lines[0]["startup_seconds"])


def test_samples_do_not_disturb_training(job):
    assert job.run() == 0
    drawn = job.copy("drawn").change(
        sample={"prompts": ["x"], "width": 32, "height": 32, "sample_steps": 1, "sample_every": 1}
    )
    assert drawn.run() == 0
    assert drawn.newest()["adapter.safetensors"] == job.newest()["adapter.safetensors"]


def test_the_exported_adapter_loads_into_the_pipeline(job, tmp_path, tiny_model_folder):
    from diffusers import ZImagePipeline

    from lora_trainer.export import load_into_pipeline

    assert job.run() == 0
    file = tmp_path / "adapter.safetensors"
    assert job.store.fetch(layout.FINAL + "adapter.safetensors", file)
    pipe = ZImagePipeline.from_pretrained(str(tiny_model_folder("zimage")))
    assert load_into_pipeline(pipe, file) > 0


# ---------------------------------------------------------------------- 64: configuration
def test_a_run_configuration_that_is_missing_broken_or_wrong_names_what_is_wrong(job, tmp_path):
    job.write()
    assert end(job, path=tmp_path / "nowhere.json")[0] == ExitCode.CONFIGURATION
    code, message = end(job, path=job.write_raw("{"))
    assert (code, "is not JSON" in message) == (ExitCode.CONFIGURATION, True)
    document = json.loads(job.write().read_text())
    document["config"]["save"]["max_step_save"] = 3
    code, message = end(job, path=job.write_raw(json.dumps(document)))
    assert code == ExitCode.CONFIGURATION
    assert message == "config.save.max_step_save: unknown field; did you mean max_step_saves?"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"name_or_path": "/nowhere"}}, "model folder /nowhere"),
        ({"model": {"arch": "flux2_klein_4b"}}, "ZImagePipeline"),
        ({"network": {"only_if_contains": ["nothing"]}}, "config.network.only_if_contains"),
        ({"device": "cuda"}, "config.device: cuda needs a CUDA device"),
    ],
)
def test_what_can_t_be_trained_ends_with_64(job, changes, expected):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, message = end(job.change(**changes))
    assert code == ExitCode.CONFIGURATION
    assert expected in message


def test_another_job_s_directory_is_refused(job):
    assert job.run() == 0
    job.document["uid"] = "another"
    code, message = end(job)
    assert (code, message.startswith("output.path: ")) == (ExitCode.CONFIGURATION, True)


def test_an_s3_model_without_an_s3_store_names_the_field(job):
    code, message = end(job.change(model={"name_or_path": "s3://models/z"}))
    assert code == ExitCode.CONFIGURATION
    assert message.startswith("config.model.name_or_path: no store of the profile has the bucket 'models'")


# ---------------------------------------------------------------------- 65: data
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: [path.unlink() for path in folder.glob("*.png")], "no pictures in"),
        (lambda folder: (folder / "1.txt").write_bytes(b"caf\xe9"), "1.txt: the caption is not UTF-8: byte 3"),
        (lambda folder: (folder / "2.png").write_text("not a picture"), "2.png: not a readable picture"),
        (lambda folder: (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:120]), "3.png: not a readable"),
        (lambda folder: make_pictures(folder, [(10, 10)]), "0.png: the picture is too small: 10x10"),
    ],
)
def test_data_that_can_t_be_used_ends_with_65_and_names_the_file(job, tmp_path, spoil, expected):
    folder = make_pictures(tmp_path / "data")
    spoil(folder)
    job.config["datasets"][0]["folder_path"] = str(folder)
    code, message = end(job)
    assert code == ExitCode.DATA
    assert expected in message
    assert "\n" not in message


def test_a_missing_dataset_folder_names_the_field(job):
    job.config["datasets"][0]["folder_path"] = "/nowhere"
    assert end(job) == (ExitCode.DATA, "config.datasets[0].folder_path: /nowhere is not a folder")


# ---------------------------------------------------------------------- 75, 77: the store
def test_a_store_that_stays_away_ends_with_75(job, monkeypatch):
    from lora_trainer import retry, train

    def away(store, key, data):
        raise StoreError("the store is away")

    monkeypatch.setattr(train, "RetryingStore", lambda store: retry.RetryingStore(store, (0.0, 0.0)))
    monkeypatch.setattr(DirectoryStore, "put", away)
    assert end(job) == (ExitCode.TRANSIENT, "the store is away")


def test_a_store_that_loses_reports_only_does_not_end_training(job, monkeypatch, caplog):
    put = DirectoryStore.put

    def forgetful(store, key, data):
        if key in (layout.PROGRESS, layout.metrics(1)):
            raise StoreError("the store is away")
        put(store, key, data)

    monkeypatch.setattr(DirectoryStore, "put", forgetful)
    assert job.run() == 0
    assert caplog.text.count("reports can't be written") == 1


def test_an_s3_store_without_keys_ends_with_77(job, tmp_path):
    job.document["store"] = {"name": "s3", "type": "s3", "endpoint": "http://127.0.0.1:1", "bucket": "runs"}
    code, message = end(job)
    assert code == ExitCode.CREDENTIALS
    assert "no credentials were given" in message


# ---------------------------------------------------------------------- 86, 87 and the rest
def test_device_memory_running_out_ends_with_86(job):
    def run_out(session, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nlong story")

    code, message = end(job, hook=run_out)
    assert code == ExitCode.OUT_OF_MEMORY
    assert message.startswith(
        "out of device memory while training step 2: CUDA out of memory. Tried to allocate 2 GiB; halve train.batch_size"
    )
    assert "long story" not in message


def test_a_loss_that_stays_not_finite_ends_with_87_and_saves_nothing(job, monkeypatch):
    from lora_trainer import loop
    from lora_trainer.losses import Loss

    def broken(velocity, *_, **__):
        return Loss(velocity.sum() * float("nan"), velocity.sum() * float("nan"))

    monkeypatch.setattr(loop, "loss_of", broken)
    code, message = end(job.change(train={"max_nonfinite_steps": 2}))
    assert code == ExitCode.NOT_FINITE
    assert "config.train.max_nonfinite_steps" in message
    assert job.steps() == []
    assert job.progress().nonfinite_steps == 2


def test_an_error_nobody_foresaw_is_1_with_its_traceback_in_the_log(job, caplog):
    def break_down(session, step):
        raise KeyError("surprise")

    assert end(job, hook=break_down) == (1, "KeyError: 'surprise'")
    assert "Traceback" in caplog.text


def test_a_user_s_mistake_is_one_line_without_a_traceback(job, caplog):
    job.config["datasets"][0]["folder_path"] = "/nowhere"
    job.run()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Stopped("SIGTERM"), 85),
        (FencedError("start 2"), 75),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:3. This is typically caused"),
            75,
        ),
        (torch.distributed.DistNetworkError("no route"), 75),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 86),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), 86),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 86),
        (RuntimeError("something else"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_errors_of_libraries_have_codes_too(error, code):
    word = endings.word_of(error, 3)
    assert word.code == code
    assert "typically" not in word.message
