"""Every mistake is named by its field, with what was found, what was expected, and what to write instead."""

from __future__ import annotations

import pytest

from lora_api.config import TrainerConfig
from lora_api.crd import job_crd, profile_crd
from lora_api.job import LoRATrainingJob
from lora_api.patterns import PATTERN_WORDS
from lora_api.problems import InvalidDocument, parse
from lora_api.profile import LoRATrainingProfile
from lora_api.schema import ONE_LINE, walk
from tests.bad_manifests import ARCHS, BAD, JOB, PROFILE, Bad, changed


def messages(kind, raw, root=""):
    with pytest.raises(InvalidDocument) as caught:
        parse(kind, raw, root)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_one_mistake_gives_one_exact_message(bad: Bad):
    assert messages(bad.kind, bad.manifest) == [bad.message]


def test_the_manifests_without_a_mistake_are_good():
    assert parse(LoRATrainingJob, JOB).spec.config.train.steps == 1000
    assert parse(LoRATrainingProfile, PROFILE).spec.store("default") is not None


def test_all_mistakes_are_told_at_once_in_the_order_of_the_document():
    raw = changed(JOB, "spec.config.train.lr", 0)
    raw = changed(raw, "spec.config.model.arch", "sd3")
    raw = changed(raw, "spec.config.save.max_step_saves", 0)
    assert [line.partition(": ")[0] for line in messages(LoRATrainingJob, raw)] == [
        "spec.config.model.arch",
        "spec.config.train.lr",
        "spec.config.save.max_step_saves",
    ]


def test_a_list_of_wrong_items_is_not_also_called_too_short():
    assert messages(LoRATrainingJob, changed(JOB, "spec.config.datasets", [1, 2])) == [
        "spec.config.datasets[0]: found 1 (number), expected an object",
        "spec.config.datasets[1]: found 2 (number), expected an object",
    ]


def test_the_mistakes_of_a_header_are_told_too():
    assert messages(LoRATrainingJob, changed(JOB, "kind", "Job")) == ['kind: found "Job", expected LoRATrainingJob']
    assert messages(LoRATrainingJob, changed(JOB, "apiVersion", "v1")) == [
        'apiVersion: found "v1", expected lora-operator.io/v1alpha1'
    ]
    assert messages(LoRATrainingJob, changed(JOB, "metadata", {})) == ["metadata.name: is required, but missing"]
    assert messages(LoRATrainingJob, JOB | {"steps": 3}) == [
        "steps: unknown field; did you mean spec.config.train.steps?"
    ]


@pytest.mark.parametrize(
    ("raw", "said"), [(None, "found null (null), expected an object"), ([1], "found [1] (list), expected an object")]
)
def test_something_that_is_no_manifest_at_all_is_said_to_be_so(raw, said):
    assert messages(LoRATrainingJob, raw) == [said]


def test_text_that_json_does_not_know_is_refused_and_not_a_crash():
    [said] = messages(LoRATrainingJob, changed(JOB, "spec.config.trigger_word", "\ud800"))
    assert said.startswith("is not valid JSON: ")


def test_a_key_without_a_value_is_a_key_left_out():
    raw = changed(changed(JOB, "spec.config.save", None), "spec.config.train", {"lr": None, "steps": 5})
    assert parse(LoRATrainingJob, raw) == parse(LoRATrainingJob, changed(JOB, "spec.config.train", {"steps": 5}))


def test_paths_start_at_the_root_that_was_given():
    raw = {"model": {"arch": "zimage", "name_or_path": "m"}, "datasets": [{"folder_path": "d", "repeats": 1}]}
    assert messages(TrainerConfig, raw, "config") == [
        "config.datasets[0].repeats: unknown field; did you mean num_repeats?"
    ]
    raw["datasets"] = [{"folder_path": "d"}]
    assert messages(TrainerConfig, raw | {"save_every": 1}, "config") == [
        "config.save_every: unknown field; did you mean config.save.save_every?"
    ]


def test_long_values_are_cut_off():
    [said] = messages(LoRATrainingJob, changed(JOB, "spec.config.train.steps", "x" * 1000))
    assert len(said) < 200
    assert "..." in said


def test_two_choices_that_are_equally_near_are_both_suggested():
    [said] = messages(LoRATrainingJob, changed(JOB, "spec.config.model.arch", "flux2_klein"))
    assert said == (
        f'spec.config.model.arch: "flux2_klein" is not one of {ARCHS}; did you mean flux2_klein_4b or flux2_klein_9b?'
    )


@pytest.mark.parametrize(
    ("path", "written", "meant"),
    [
        ("train.optimizer", "adamw8", "adamw8bit"),
        ("train.optimizer", "AdamW_8bit", "adamw8bit"),
        ("train.optimizer", "paged_adamw_8bit", "adamw8bit"),
        ("train.optimizer", "Lion8bit", "lion"),
        ("train.optimizer", "AdamWScheduleFree", "schedule_free_adamw"),
        ("train.optimizer", "ProdigyOpt", "prodigy"),
        ("train.optimizer", "sgd", None),
        ("train.lr_scheduler", "cosine_warmup", "cosine"),
        ("train.lr_scheduler", "constant_with_warmup", "constant"),
        ("train.lr_scheduler", "OneCycleLR", "one_cycle"),
        ("train.lr_scheduler", "step", None),
        ("train.loss_type", "l2", "mse"),
        ("train.loss_type", "L1", "mae"),
        ("train.loss_type", "mse_loss", "mse"),
        ("train.timestep_type", "sigmoid", "logit_normal"),
        ("train.timestep_type", "linear", "uniform"),
        ("train.parallelism", "zero3", "fsdp"),
        ("train.dtype", "no", "fp32"),
        ("model.quantize", "qfloat8", "fp8"),
        ("model.quantize", "uint4", "nf4"),
        ("network.type", "full_finetune", "full"),
        ("network.type", "LoHA", "loha"),
    ],
)
def test_choices_are_recognised_unfinished_reordered_extended_and_by_what_other_tools_call_them(path, written, meant):
    [said] = messages(LoRATrainingJob, changed(JOB, f"spec.config.{path}", written))
    assert said.partition("; did you mean ")[2].removesuffix("?") == (meant or "")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("ema_decay", "spec.config.train.ema_config.ema_decay"),
        ("ema_config", "spec.config.train.ema_config"),
        ("train.snr_gamma", "min_snr_gamma"),
        ("train.min_snr", "min_snr_gamma"),
        ("train.learning_rate", "lr"),
        ("train.max_train_steps", "steps"),
        ("train.mixed_precision", "dtype"),
        ("train.lr_scheduler_num_cycles", "spec.config.train.lr_scheduler_params.num_cycles"),
        ("train.low_vram", "spec.config.model.offload_blocks"),
        ("network.network_dim", "linear"),
        ("network.r", "linear"),
        ("network.k", None),
        ("datasets.0.path", "folder_path"),
        ("datasets.0.mask", "mask_path"),
        ("save.checkpoints_total_limit", "max_step_saves"),
    ],
)
def test_fields_are_recognised_by_what_other_tools_call_them(path, meant):
    [said] = messages(LoRATrainingJob, changed(JOB, f"spec.config.{path}", 1))
    assert said.partition("; did you mean ")[2].removesuffix("?") == (meant or "")


@pytest.mark.parametrize(
    ("path", "written", "instead"),
    [
        ("datasets.0.weight", 3, "; write [{value: 3}]"),
        ("datasets.0.weight", [3], "; write {value: 3}"),
        ("datasets.0.weight", {"value": 3}, "; write [{value: 3}]"),
        ("datasets.0.weight", "much", ""),
        ("datasets", "s3://d/a", '; write [{folder_path: "s3://d/a"}]'),
        ("sample", 3, ""),
        ("train.ema_config", True, ""),
    ],
)
def test_where_an_object_needs_one_key_it_is_written_around_the_value(path, written, instead):
    [said] = messages(LoRATrainingJob, changed(JOB, f"spec.config.{path}", written))
    assert said.partition("expected an object")[2] + said.partition("expected a list")[2] == instead


def test_the_family_of_another_package_is_a_model_arch():
    assert parse(LoRATrainingJob, changed(JOB, "spec.config.model.arch", "x-aura.flow_2")).spec.config.model.arch == (
        "x-aura.flow_2"
    )


@pytest.mark.parametrize("arch", ["flux1", "sd15", "sdxl", "x-mine"])
def test_text_encoders_can_be_trained_where_the_loader_takes_them(arch):
    raw = changed(changed(JOB, "spec.config.model.arch", arch), "spec.config.train.train_text_encoder", True)
    assert (
        parse(LoRATrainingJob, changed(raw, "spec.config.train.train_unet", False)).spec.config.train.text_encoder_lr
        is None
    )


def test_every_pattern_has_words():
    patterns = {
        node["pattern"]
        for crd in (job_crd(), profile_crd())
        for _, node in walk(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        if "pattern" in node
    }
    assert patterns - {ONE_LINE} == set(PATTERN_WORDS)
