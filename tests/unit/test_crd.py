"""The CRDs as data: structural, bounded, described, and no looser than the types."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import AfterValidator, BaseModel, Field

from lora_api import cel
from lora_api.config import MUTABLE_CONFIG_PATHS
from lora_api.crd import job_crd, profile_crd
from lora_api.job import LoRATrainingJob
from lora_api.profile import LoRATrainingProfile
from lora_api.rules import RULES
from lora_api.schema import ITEMS, at, structural, walk, without_nulls
from lora_api.suggestions import model_in
from tests.bad_manifests import BAD

KEYWORDS = {
    "description", "type", "format", "enum", "pattern", "default", "required", "properties", "items", "additionalProperties",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
    "maxProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip


def schema_of(crd):
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


CRDS = pytest.mark.parametrize("schema", [schema_of(job_crd()), schema_of(profile_crd())], ids=["job", "profile"])


@CRDS
def test_every_field_is_described(schema):
    silent = [
        path
        for path, node in walk(schema)
        if path and path[-1] != ITEMS and path != ("metadata",) and "description" not in node
    ]
    assert silent == []


@CRDS
def test_only_keywords_of_structural_schemas_are_used(schema):
    assert {key for _, node in walk(schema) for key in node} <= KEYWORDS


@CRDS
def test_everything_in_the_spec_has_an_upper_bound(schema):
    limit = {"array": "maxItems", "string": "maxLength", "object": "maxProperties"}
    unbounded = [
        path
        for path, node in walk(at(schema, ("spec",)))
        if node["type"] in limit and "enum" not in node and "properties" not in node and limit[node["type"]] not in node
    ]
    assert unbounded == []


@CRDS
def test_numbers_have_a_width(schema):
    widths = {"integer": "int64", "number": "double"}
    assert all(node["format"] == widths[node["type"]] for _, node in walk(schema) if node["type"] in widths)


@CRDS
def test_defaults_are_never_null_and_fit_their_type(schema):
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    for path, node in walk(schema):
        if "default" in node:
            assert isinstance(node["default"], kinds[node["type"]]), path
            assert without_nulls(node["default"]) == node["default"], path


@CRDS
def test_every_rule_speaks_of_a_field_that_exists(schema):
    for path, node in walk(schema):
        for rule in node.get("x-kubernetes-validations", ()):
            if "fieldPath" in rule:
                assert at(schema, (*path, *rule["fieldPath"].removeprefix(".").split(".")))
            assert rule["message"]
            assert "\n" not in rule["rule"]


VALIDATORS = {
    "NetworkConfig._factor_is_not_zero": "spec.config.network.lokr_factor",
    "NetworkConfig._dropout_has_a_meaning": "spec.config.network.dropout",
    "NetworkConfig._ranks_have_a_meaning": "spec.config.network.lokr_full_rank",
    "NetworkConfig._full_has_no_ranks": "spec.config.network.modules",
    "ModuleRule._frozen_layers_have_no_settings": "spec.config.network.modules[0].freeze",
    "SaveConfig._formats_differ": "spec.config.save.formats",
    "rules.whole_models_have_one_format": "spec.config.save.formats",
    "rules.two_experts_are_trained_with_fresh_adapters": "spec.config.network.type",
    "rules.formats_are_known_for_the_family": "spec.config.save.formats",
    "rules.assistants_need_additive_adapters": "spec.config.model.assistant_lora_path",
    "rules.clips_need_a_video_family": "spec.config.sample.num_frames",
    "rules.fsdp_can_shard_it": "spec.config.train.parallelism",
    "DatasetConfig.num_frames._clip_length": "spec.config.datasets[0].num_frames",
    "SampleConfig.num_frames._clip_length": "spec.config.sample.num_frames",
    "ModelConfig.name_or_path._hub_form": "spec.config.model.name_or_path",
    "ModelConfig.extras_name_or_path._hub_form": "spec.config.model.extras_name_or_path",
    "ModelConfig.assistant_lora_path._hub_form": "spec.config.model.assistant_lora_path",
    "NetworkConfig.init_from._hub_form": "spec.config.network.init_from",
    "ModelConfig._a_file_has_extras": "spec.config.model.extras_name_or_path",
    "ModelConfig.arch._known_arch": "spec.config.model.arch",
    "DatasetConfig._masks_have_one_source": "spec.config.datasets[0].alpha_mask",
    "rules.density_settings_play_a_part": "spec.config.train.logit_mean",
    "rules.some_noise_levels_are_left": "spec.config.train.min_timestep",
    "rules.noise_levels_are_shifted_one_way": "spec.config.train.timestep_shift",
    "rules.delta_settings_play_a_part": "spec.config.train.huber_delta",
    "rules.samples_are_weighed_one_way": "spec.config.train.loss_weighting",
    "rules.something_is_trained": "spec.config.train.train_unet",
    "rules.text_encoder_can_be_trained": "spec.config.train.train_text_encoder",
    "rules.the_warm_up_is_given_once": "spec.config.train.warmup_ratio",
    "rules.the_schedule_has_the_shape_it_is_given": "spec.config.train.lr_scheduler_params.num_cycles",
    "rules.optimizers_get_what_they_have": "spec.config.train.adam_beta1",
    "rules.rates_of_prodigy_are_factors": "spec.config.train.lr",
    "rules.schedule_free_has_no_schedule": "spec.config.train.lr_scheduler",
    "rules.all_stages_but_the_last_have_steps": "spec.config.train.stages[0].steps",
    "rules.stages_are_as_long_as_the_run": "spec.config.train.stages",
    "rules.weights_are_given_in_order": "spec.config.datasets[0].weight",
    "rules.all_datasets_have_weights_or_none": "spec.config.datasets[1].weight",
    "rules.something_weighs_at_every_step": "spec.config.datasets[0].weight",
    "rules.something_is_no_regularisation_set": "spec.config.datasets[0].is_reg",
    "rules.stages_fit_the_optimizer": "spec.config.train.stages[0].lr",
    "rules.schedules_of_stages_have_a_meaning": "spec.config.train.stages[0].lr_scheduler_params",
    "rules.quantised_weights_are_not_trained": "spec.config.model.quantize",
    "rules.resting_blocks_are_not_trained_nor_compiled": "spec.config.model.offload_blocks",
    "rules.skipped_blocks_need_checkpointing": "spec.config.train.gradient_checkpointing_every",
    "rules.one_average_is_enough": "spec.config.train.ema_config.use_ema",
    "OutputSpec.path._no_dot_segments": "spec.output.path",
    "StoreSpec._fields_fit_the_type": "spec.stores[0].endpoint",
    "ProfileSpec._store_names_differ": "spec.stores",
}
"""Every validator of the types, but for that of single lines, and a field that it refuses."""


def checks(annotation, metadata):
    yield from (entry.func.__name__ for entry in metadata if isinstance(entry, AfterValidator))
    for argument in get_args(annotation):
        yield from checks(argument, getattr(argument, "__metadata__", ()))


def validators(model):
    for name in model.__pydantic_decorators__.model_validators:
        if name == "_its_parts_fit_together":
            yield from (f"rules.{rule.__name__}" for rule in RULES)
        else:
            yield f"{model.__name__}.{name}"
    for name, field in model.model_fields.items():
        found = checks(field.annotation, field.metadata)
        yield from (f"{model.__name__}.{name}.{check}" for check in found if check != "_one_line")
        inner = model_in(field.annotation)
        if inner:
            yield from validators(inner)


def test_every_validator_of_the_types_is_tried_against_the_server_too():
    assert {*validators(LoRATrainingJob), *validators(LoRATrainingProfile)} == set(VALIDATORS)
    assert set(VALIDATORS.values()) <= {bad.message.partition(": ")[0] for bad in BAD if bad.server}


def test_every_rule_across_fields_is_tried_against_the_types_too():
    tried = {bad.field for bad in BAD if bad.server}
    for rule in (*cel.JOB_RULES, *cel.PROFILE_RULES):
        field = ".".join((*rule.on, rule.field) if rule.field else rule.on).replace(f".{ITEMS}", "[0]")
        assert field in tried


def fixed_fields():
    return {(*rule.on[1:], rule.field) for rule in cel.immutable(schema_of(job_crd()))}


def test_what_defines_the_run_is_fixed_and_nothing_else():
    fixed = fixed_fields()
    leaves = {
        path
        for path, node in walk(at(schema_of(job_crd()), ("spec",)))
        if path and "properties" not in node and ITEMS not in path
    }
    mutable = {path for path in leaves if any(path[: len(m)] == m for m in cel.MUTABLE_SPEC_PATHS)}
    assert fixed == leaves - mutable
    assert {path[:2] for path in mutable if path[0] == "config"} == {
        ("config", "save"), ("config", "sample"), ("config", "train"),
    }  # fmt: skip


def test_what_the_types_call_mutable_is_mutable():
    assert {("config", *path) for path in MUTABLE_CONFIG_PATHS} < set(cel.MUTABLE_SPEC_PATHS)
    assert not fixed_fields() & set(cel.MUTABLE_SPEC_PATHS)


def test_names_of_the_kinds():
    names = job_crd()["spec"]["names"]
    assert (names["plural"], names["singular"], names["shortNames"]) == ("loratrainingjobs", "loratrainingjob", ["ltj"])
    assert job_crd()["spec"]["scope"] == "Namespaced"
    assert job_crd()["spec"]["versions"][0]["subresources"] == {"status": {}}
    names = profile_crd()["spec"]["names"]
    assert (names["plural"], names["singular"], names["shortNames"]) == (
        "loratrainingprofiles",
        "loratrainingprofile",
        ["ltp"],
    )
    assert profile_crd()["spec"]["scope"] == "Cluster"


@pytest.mark.parametrize("crd", [job_crd(), profile_crd()], ids=["job", "profile"])
def test_every_column_reads_a_field_that_exists(crd):
    for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = tuple(column["jsonPath"].replace("[*]", f".{ITEMS}").removeprefix(".").split("."))
        if path[0] != "metadata":
            node = at(schema_of(crd), path)
            assert column["type"] == node["type"]


class Inner(BaseModel):
    """Inner."""

    ratio: float | None = Field(None, gt=0, lt=1, description="A share.")


class Outer(BaseModel):
    """Outer."""

    inner: Inner = Field(Inner(), description="Beside the reference.")
    many: tuple[Inner, ...] = Field((), max_length=3, description="Many.")
    words: dict[str, str] = Field({}, description="Words.")


def test_references_optionals_and_exclusive_limits_become_structural():
    ratio = {
        "description": "A share.", "type": "number", "format": "double",
        "minimum": 0.0, "exclusiveMinimum": True, "maximum": 1.0, "exclusiveMaximum": True,
    }  # fmt: skip
    inner = {"type": "object", "properties": {"ratio": ratio}}
    assert structural(Outer) == {
        "description": "Outer.",
        "type": "object",
        "properties": {
            "inner": {"description": "Beside the reference.", **inner, "default": {}},
            "many": {
                "description": "Many.", "type": "array", "maxItems": 3, "default": [],
                "x-kubernetes-list-type": "atomic", "items": {"description": "Inner.", **inner},
            },
            "words": {
                "description": "Words.", "type": "object", "default": {}, "additionalProperties": {"type": "string"},
            },
        },
    }  # fmt: skip


def test_a_union_is_refused_while_it_is_made_and_not_by_the_server():
    class Either(BaseModel):
        """Either."""

        value: int | str = Field(0, description="Either.")

    with pytest.raises(AssertionError, match="union"):
        structural(Either)
