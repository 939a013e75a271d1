"""The trainer's configuration: what defines the run, and what a change of it means."""

from __future__ import annotations

import pytest

from lora_api.config import MUTABLE_CONFIG_PATHS, TrainerConfig
from lora_api.exit_codes import NEVER_RETRIED, ExitCode, reason_of
from lora_api.foreign_words import ALIASES
from lora_api.job import JobStatus, LoRATrainingJob, status_to_wire
from lora_api.problems import parse
from lora_api.run import Control, Progress, RunConfig, config_hash
from lora_api.suggestions import fields_at
from tests.bad_manifests import JOB, PROFILE, changed


def config(**changes):
    raw = JOB
    for path, value in changes.items():
        raw = changed(raw, "spec.config." + path.replace("__", "."), value)
    return parse(LoRATrainingJob, raw).spec.config


@pytest.mark.parametrize(
    "changes",
    [
        {"save__save_every": 7},
        {"save__dtype": "fp32"},
        {"sample__prompts": ["a picture"]},
        {"train__steps": 7},
        {"train__lr": 0.5},
        {"device": "cpu"},
        {"performance_log_every": 10},
    ],
    ids=str,
)
def test_what_may_change_is_not_part_of_the_hash(changes):
    assert config_hash(config(**changes)) == config_hash(config())


@pytest.mark.parametrize(
    "changes",
    [
        {"model__arch": "flux2_klein_4b"},
        {"network__linear": 8},
        {"train__batch_size": 2},
        {"train__seed": 1},
        {"trigger_word": "x"},
        {"datasets__0__num_repeats": 2},
    ],
    ids=str,
)
def test_what_defines_the_run_is_part_of_the_hash(changes):
    assert config_hash(config(**changes)) != config_hash(config())


def test_a_default_that_is_written_out_changes_nothing():
    assert config_hash(config(train__batch_size=1, network__linear_alpha=None)) == config_hash(config())


def test_the_hash_is_the_same_in_every_version():
    """A change here would make every running job refuse its own run directory after an upgrade."""
    assert len(config_hash(config())) == 16
    assert config_hash(config()) == config_hash(TrainerConfig.model_validate_json(config().model_dump_json()))


def test_mutable_paths_exist():
    for path in MUTABLE_CONFIG_PATHS:
        assert path[-1] in fields_at(TrainerConfig, path[:-1])


def test_aliases_lead_to_fields_that_exist_and_are_no_fields_themselves():
    known = {
        name
        for parent in (
            (),
            ("model",),
            ("network",),
            ("datasets",),
            ("train",),
            ("train", "lr_scheduler_params"),
            ("save",),
            ("sample",),
        )
        for name in fields_at(TrainerConfig, parent)
    }
    assert set(ALIASES.values()) <= known
    assert not set(ALIASES) & known


def test_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        config().train.steps = 5


def test_a_run_configuration_survives_being_written_and_read():
    run = RunConfig(
        job_name="a", namespace="b", uid="c", attempt=1, config=config(), store=PROFILE["spec"]["stores"][0], path="b/a"
    )
    assert RunConfig.model_validate_json(run.model_dump_json(by_alias=True)) == run


def test_documents_of_a_newer_writer_are_read():
    raw = {"start": 1, "attempt": 1, "stage": "Training", "step": 1, "steps": 2, "updatedAt": "now", "newer": 1}
    assert parse(Progress, raw).step == 1
    assert (
        parse(Control, {"generation": 1, "steps": 1, "lr": 1, "saveEvery": 1, "maxStepSaves": 1, "newer": 1}).steps == 1
    )


def test_a_status_on_the_wire_has_no_nulls_and_reads_back():
    wire = status_to_wire(JobStatus())
    assert "stage" not in wire
    assert parse(JobStatus, wire) == JobStatus()


def test_where_the_output_goes_when_the_job_does_not_say():
    assert parse(LoRATrainingJob, JOB).output_path == "default/mascot"
    assert parse(LoRATrainingJob, changed(JOB, "spec.output.path", "x/y")).output_path == "x/y"


def test_exit_codes_have_their_reserved_numbers_and_distinct_reasons():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "CONFIGURATION": 64,
        "DATA": 65,
        "CHECKPOINT_INTEGRITY": 66,
        "TRANSIENT": 75,
        "CREDENTIALS": 77,
        "PREEMPTED": 85,
        "OUT_OF_MEMORY": 86,
        "NOT_FINITE": 87,
    }
    assert len({reason_of(code) for code in ExitCode}) == len(ExitCode)
    assert reason_of(1) == reason_of(137) == "Error"
    assert {64, 65, 77} <= NEVER_RETRIED
    assert not {75, 85, 86} & NEVER_RETRIED


def test_the_hash_of_a_configuration_stays_the_same_from_version_to_version():
    minimal = {"model": {"arch": "zimage", "name_or_path": "/m"}, "datasets": [{"folder_path": "/d"}]}
    assert config_hash(parse(TrainerConfig, minimal)) == "a9ac78a848dcbf89", "checkpoints of running jobs carry it"
