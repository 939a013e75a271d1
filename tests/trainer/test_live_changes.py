"""Changes through `control.json` while a job trains: at the next step, on record, and exact across interruptions."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load

from lora_api import layout
from lora_api.exit_codes import ExitCode
from lora_api.run import Control
from lora_trainer import checkpoint
from lora_trainer.control import ControlWatch, read_control
from lora_trainer.data.cache import TensorCache, text_key
from lora_trainer.prompts import take_prompts
from tests.trainer.jobs import Job, make_pictures

SAMPLE = {"width": 32, "height": 32, "sample_steps": 1, "sample_every": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data"), [(64, 64)] * 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, data, cache, monkeypatch):
    def read_now(watch, generation):
        found = read_control(watch._store)
        return found if found is not None and found.generation > generation else None

    monkeypatch.setattr(ControlWatch, "newer_than", read_now)  # without waiting for the watching thread

    def make(arch: str = "zimage", **changes) -> Job:
        train = {"steps": 8, "lr": 3e-3, "lr_scheduler": "cosine"}
        return Job(tmp_path / "whole", tiny_model_folder(arch), data, cache, arch, train=train).change(**changes)

    return make


def change_at(step: int, generation: int = 2, **changes):
    """A hook that writes a control document after a step."""

    def hook(session, now: int) -> None:
        if now == step:
            document = session.settings.document.model_dump(by_alias=True)
            document |= {"generation": generation, **changes}
            session.store.put(layout.CONTROL, json.dumps(document).encode())

    return hook


def bits(job: Job) -> tuple[bytes, bytes]:
    newest = job.newest()
    return newest[checkpoint.ADAPTER], newest[checkpoint.OPTIMIZER]


@pytest.mark.parametrize("crash_after", [5, 6, 7])
def test_a_change_and_a_crash_that_goes_back_before_it_end_as_the_change_alone(job, crash_after):
    hook = change_at(3, steps=10, lr=1e-2, saveEvery=4)
    whole = job()
    assert whole.run(hook=hook) == ExitCode.DONE
    unchanged = whole.copy("unchanged").change(train={"steps": 10})
    assert unchanged.run() == ExitCode.DONE
    assert bits(unchanged) != bits(whole)
    broken = whole.copy("broken")
    assert broken.run(hook=hook, crash_after=crash_after) == 1
    assert broken.steps() == [3]
    assert broken.run() == ExitCode.DONE
    assert bits(broken) == bits(whole)
    rates = [
        {line["step"]: line["lr"] for line in each.metrics(start) if "lr" in line}
        for each, start in ((whole, 1), (broken, 2))
    ]
    assert rates[1] == {step: lr for step, lr in rates[0].items() if step > 3}
    told = [line for line in broken.metrics(2) if "control" in line]
    assert [(line["step"], line["control"]["generation"]) for line in told] == [(4, 2)]
    assert json.loads(broken.newest()[checkpoint.STATE])["control"]["lr"] == 1e-2


def test_a_second_crash_after_the_change_came_again_changes_no_bit(job):
    hook = change_at(3, lr=1e-2)
    whole = job()
    assert whole.run(hook=hook) == ExitCode.DONE
    broken = whole.copy("broken")
    assert broken.run(hook=hook, crash_after=5) == 1
    assert broken.run(crash_after=3 + 1) == 1
    assert broken.run(stop_after=7) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert bits(broken) == bits(whole)


def test_a_change_that_a_start_begins_with_comes_again_before_a_later_one(job):
    first = job(save={"save_every": 100})
    assert first.run(stop_after=4) == ExitCode.PREEMPTED
    broken = first.copy("broken")
    for item in first.store.list():
        broken.store.put(item.key, first.store.get(item.key))
    change = json.loads(first.newest()[checkpoint.STATE])["control"] | {"generation": 2, "lr": 1e-2}
    for each in (first, broken):
        each.store.put(layout.CONTROL, json.dumps(change).encode())
    hook = change_at(5, 3, lr=2e-2)
    assert first.run(hook=hook) == ExitCode.DONE
    assert broken.run(hook=hook, crash_after=7) == 1
    assert broken.steps() == [4]
    assert broken.run() == ExitCode.DONE
    rates = [
        {line["step"]: line["lr"] for line in each.metrics(start) if "lr" in line}
        for each, start in ((first, 2), (broken, 3))
    ]
    assert rates[0] == rates[1]
    assert bits(broken) == bits(first)


def test_a_change_made_while_the_old_ones_come_again_holds_at_once(job):
    broken = job()
    assert broken.run(hook=change_at(5, lr=1e-2), crash_after=7) == 1
    newest = read_control(broken.store).model_copy(update={"generation": 3, "lr": 5e-2})
    first = broken.copy("first")
    key = layout.checkpoint_folder(6, 1)
    for item in broken.store.list():
        if not item.key.startswith((key, "starts/")):  # of the checkpoints the one before the change is left
            first.store.put(item.key, broken.store.get(item.key))
    first.store.put(layout.STARTS + "000001.json", broken.store.get(layout.STARTS + "000001.json"))

    def hook(session, step):
        if step == 4:
            session.store.put(layout.CONTROL, newest.model_dump_json(by_alias=True).encode())

    assert first.run(hook=hook) == ExitCode.DONE
    told = [(line["step"], line["control"]["generation"]) for line in first.metrics(2) if "control" in line]
    assert told == [(5, 3)]


def test_new_prompts_are_drawn_at_the_next_round_and_the_text_encoders_let_go(job, cache):
    hook = change_at(2, sample={**SAMPLE, "prompts": ["a [trigger]", "new words"]})
    seen = []

    def watch(session, step):
        hook(session, step)
        seen.append((step, session.prepared.prompts, session.prepared.model.pipe.text_encoder))

    drawn = job(trigger_word="sks", sample={**SAMPLE, "prompts": ["a [trigger]"]}, train={"steps": 6})
    assert drawn.run(hook=watch) == ExitCode.DONE
    names = {
        step: [item.key.rpartition("/")[2] for item in drawn.store.list(layout.samples_folder(step))] for step in (2, 4)
    }
    assert names == {2: ["00.png"], 4: ["00.png", "01.png"]}
    assert [prompts for _, prompts, _ in seen] == [("a sks",)] * 4 + [("a sks", "new words")] * 2
    assert {encoder for _, _, encoder in seen} == {None}
    final = json.loads(drawn.store.get(layout.FINAL_MANIFEST))
    assert final["samples"] == ["sample-00.png", "sample-01.png"]
    undrawn = drawn.copy("undrawn").change(sample={"prompts": []})
    assert undrawn.run() == ExitCode.DONE
    assert bits(undrawn) == bits(drawn), "samples take nothing from training"


def test_new_prompts_leave_the_encoder_of_pictures_that_are_not_cached_alone(job):
    hook, encoders = change_at(1, sample={**SAMPLE, "prompts": ["seen by nobody before"]}), []

    def watch(session, step):
        hook(session, step)
        encoders.append(session.prepared.model.pipe.vae.encoder)

    drawn = job(sample={**SAMPLE, "prompts": ["x"]}, train={"steps": 5})
    drawn.config["datasets"][0]["cache_latents"] = False
    assert drawn.run(hook=watch) == ExitCode.DONE
    assert len(encoders) == 5
    assert all(each is not None and each is encoders[0] for each in encoders)


def test_prompts_may_come_to_a_run_that_had_none_and_leave_it_again(job):
    def hook(session, step):
        change_at(1, 2, sample={**SAMPLE, "prompts": ["words never read before"]})(session, step)
        change_at(4, 3, sample={**SAMPLE, "prompts": []})(session, step)

    drawn = job(train={"steps": 7})
    assert drawn.run(hook=hook) == ExitCode.DONE
    assert {item.key.split("/")[1] for item in drawn.store.list(layout.SAMPLES)} == {"step-000000004"}
    assert json.loads(drawn.store.get(layout.FINAL_MANIFEST))["samples"] == []


def test_where_the_text_encoders_have_no_room_the_old_prompts_stay(job, monkeypatch, caplog):
    from lora_trainer.families.zimage import ZImageModel

    encode = ZImageModel.encode_text

    def too_big(model, caption):
        if caption == "too big":
            raise torch.OutOfMemoryError("no room")
        return encode(model, caption)

    monkeypatch.setattr(ZImageModel, "encode_text", too_big)
    drawn = job(sample={**SAMPLE, "prompts": ["x"]}, train={"steps": 5})
    assert drawn.run(hook=change_at(1, sample={**SAMPLE, "prompts": ["too big"]})) == ExitCode.DONE
    assert "no room for the text encoders" in caplog.text
    assert len(drawn.store.list(layout.samples_folder(4))) == 1


def test_where_another_rank_has_no_room_for_them_the_old_prompts_stay_too(job):
    seen, told = [], []

    def hook(session, step):
        if step == 2:
            keep = lambda mine: told.append(mine) or True  # noqa: E731
            take_prompts(session.prepared, ("there is room here",), lambda text: None, keep)
            seen.append(session.prepared.prompts)

    drawn = job(sample={**SAMPLE, "sample_every": 0, "prompts": ["x"]}, train={"steps": 3})
    assert drawn.run(hook=hook) == ExitCode.DONE
    assert told == [False]
    assert seen == [("x",)]


def test_formats_and_number_format_of_the_result_may_change(job):
    hook = change_at(3, save={"formats": ["diffusers", "kohya"], "weights_bin": True, "dtype": "fp16"})
    changed = job(train={"steps": 5})
    assert changed.run(hook=hook) == ExitCode.DONE
    final = {item.key.removeprefix(layout.FINAL) for item in changed.store.list(layout.FINAL)}
    assert {"adapter.safetensors", "adapter.kohya.safetensors", "adapter_weights.bin"} <= final
    config = json.loads(changed.store.get(layout.FINAL + "config.json"))
    assert config["save"]["dtype"] == "fp16"
    tensors = load(changed.store.get(layout.FINAL + "adapter.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


def test_the_number_of_kept_checkpoints_may_change_where_the_trainer_removes_them(job):
    def hook(session, step):
        object.__setattr__(session.start.environment, "removes_checkpoints", True)
        change_at(5, maxStepSaves=1)(session, step)

    kept = job(save={"save_every": 2, "max_step_saves": 9}, train={"steps": 7})
    seen = []
    assert (
        kept.run(hook=lambda session, step: (hook(session, step), session.saves.close(), seen.append(kept.steps())))
        == 0
    )
    assert seen[4] == [2, 4]
    assert kept.steps() == [7]


def test_new_prompts_of_a_trained_text_encoder_stay_out_of_the_shared_cache(job, cache):
    hook = change_at(1, sample={**SAMPLE, "prompts": ["only here"]})
    keys = []

    def watch(session, step):
        hook(session, step)
        keys.append(text_key("only here", session.prepared.model.text_identity))

    trained = job("sd15", train={"steps": 5, "train_text_encoder": True}, sample={**SAMPLE, "prompts": ["x"]})
    assert trained.run(hook=watch) == ExitCode.DONE
    assert len(trained.store.list(layout.samples_folder(4))) == 1
    assert not TensorCache(cache / "tensors").holds(keys[0])


@pytest.mark.parametrize("lr", [None, 1e-2])
def test_a_start_records_a_newer_document_only_where_it_changes_something(job, lr):
    broken = job()
    assert broken.run(stop_after=4) == ExitCode.PREEMPTED
    stored = json.loads(broken.newest()[checkpoint.STATE])["control"]
    document = Control.model_validate(stored | {"generation": 2} | ({} if lr is None else {"lr": lr}))
    broken.store.put(layout.CONTROL, document.model_dump_json(by_alias=True).encode())
    assert broken.run() == ExitCode.DONE
    told = [line["control"]["lr"] for line in broken.metrics(2) if "control" in line]
    assert told == ([] if lr is None else [lr])
