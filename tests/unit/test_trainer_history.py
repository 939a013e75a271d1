"""What earlier starts have told, and what a later one makes of it."""

from __future__ import annotations

import json

import pytest

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.run import Control
from lora_api.stores import DirectoryStore
from lora_trainer.history import Change, changes_in, read_lines, recorded_control, settings_at
from lora_trainer.settings import Settings

CONFIG = TrainerConfig.model_validate(
    {
        "model": {"arch": "zimage", "name_or_path": "/m"},
        "network": {"type": "full"},
        "datasets": [{"folder_path": "/d"}],
        "train": {"steps": 100, "lr": 1e-4},
        "sample": {"prompts": ["a"]},
    }
)


def control(generation: int, **changes) -> Control:
    document = Settings.of(CONFIG).document.model_dump() | {"generation": generation, "lr": generation * 1e-3}
    return Control.model_validate(document | changes)


def line(step: int, document: Control) -> dict:
    return {"step": step, "control": json.loads(document.model_dump_json(by_alias=True))}


def test_lines_are_read_by_start_and_what_is_cut_off_is_left_out(tmp_path):
    store = DirectoryStore(tmp_path)
    for start in (10, 2):
        store.put(layout.metrics(start), f'{{"step": {start}}}\n[1]\n{{"step": 9, "lo'.encode())
    store.put("metrics/notes.txt", b"{}")
    assert list(read_lines(store).items()) == [(2, [{"step": 2}]), (10, [{"step": 10}])]
    assert list(read_lines(store, before_start=10)) == [2]


def test_of_one_generation_the_newest_start_s_word_counts():
    lines = {
        1: [line(5, control(2)), {"step": 6, "control": {"lr": "x"}}],
        2: [line(7, control(2)), line(3, control(4))],
    }
    assert [(change.step, change.control.generation) for change in changes_in(lines)] == [(3, 4), (7, 2)]


@pytest.mark.parametrize(
    ("step", "generation", "again"),
    [
        (4, 1, [2, 3]),  # both changes were made after the checkpoint: they come again at their steps
        (5, 3, []),  # the checkpoint lies at the change, its step has been made: what is newest holds at once
        (9, 3, []),
    ],
)
def test_changes_after_the_checkpoint_come_again_at_their_own_steps(step, generation, again):
    changes = (Change(5, control(2)), Change(5, control(3)))
    settings, planned = settings_at(CONFIG, control(3), control(1), changes, step)
    assert (settings.generation, [change.control.generation for change in planned]) == (generation, again)
    assert settings.lr == generation * 1e-3


@pytest.mark.parametrize(
    ("changes", "step", "generation", "again"),
    [
        ([(5, 2), (8, 3)], 5, 2, [(8, 3)]),  # the checkpoint of step 5 is made before the change of step 5
        ([(4, 3), (5, 2)], 3, 1, [(4, 3)]),  # a start took 2, the next one had 3 before it came to that
        ([(4, 2), (4, 3), (6, 2)], 4, 3, []),
    ],
)
def test_changes_come_again_as_the_newest_start_took_them(changes, step, generation, again):
    changes = tuple(Change(at, control(number)) for at, number in changes)
    settings, planned = settings_at(CONFIG, control(3), control(1), changes, step)
    assert (settings.generation, settings.lr) == (generation, generation * 1e-3)
    assert [(change.step, change.control.generation) for change in planned] == again


def test_a_change_that_nobody_saw_taking_effect_holds_at_once():
    settings, planned = settings_at(CONFIG, control(3), control(1), (Change(5, control(2)),), 4)
    assert (settings.generation, planned) == (3, ())
    settings, planned = settings_at(CONFIG, control(3), None, (Change(5, control(3)),), 4)
    assert (settings.generation, planned) == (3, ())


def test_checkpoints_of_earlier_versions_say_less_and_are_understood():
    state = json.dumps({"control": {"generation": 2, "steps": 9, "lr": 0.5, "save_every": 3}}).encode()
    found = recorded_control(state, CONFIG)
    assert found is not None
    assert (found.generation, found.max_step_saves) == (2, CONFIG.save.max_step_saves)
    assert Settings.of(CONFIG, found).sample == CONFIG.sample
    assert recorded_control(b"{}", CONFIG) is None


def test_settings_survive_being_a_document():
    changed = Settings.of(CONFIG).taking(control(4, steps=7, sample={"prompts": ["b"]}, save={"dtype": "fp16"}))
    assert (changed.steps, changed.sample.prompts, changed.save.dtype) == (7, ("b",), "fp16")
    assert Settings.of(CONFIG, changed.document) == changed
    assert (changed.config.train.lr, changed.config.save) == (changed.lr, changed.save)
    assert changed.own == CONFIG


def test_a_block_that_breaks_a_rule_of_the_whole_is_left_out_and_said(caplog):
    changed = Settings.of(CONFIG).taking(control(2, save={"formats": ["kohya"]}, sample={"prompts": ["b"]}))
    assert changed.save == CONFIG.save
    assert (changed.generation, changed.lr, changed.sample.prompts) == (2, 2e-3, ("b",))
    assert "network.type full ends in a whole denoiser" in caplog.text
    assert "save stays as it was" in caplog.text


@pytest.mark.parametrize("last", [{"steps": 60}, {}])
def test_more_and_fewer_steps_make_the_last_stage_longer_and_shorter_whatever_length_it_was_given(last, caplog):
    wire = CONFIG.model_dump(mode="json") | {"train": {"stages": [{"steps": 40}, last], "steps": 100}}
    settings = Settings.of(TrainerConfig.model_validate(wire))
    for generation, steps in ((2, 150), (3, 41)):
        settings = settings.taking(control(generation, steps=steps))
        assert (settings.steps, settings.lr) == (steps, generation * 1e-3)
        TrainerConfig.model_validate(settings.config.model_dump(mode="json"))  # as it is written beside the result
    assert not caplog.records
    assert settings.taking(control(4, steps=40)).steps == 41, "nothing would be left of the last stage"
