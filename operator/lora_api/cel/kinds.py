"""What the API server checks beyond types: CEL rules, each the twin of a validator in the pydantic types.

A rule lies on the object whose fields it reads and names the field it speaks of; its message says what was found and what
was expected. `tests/integration/test_crd_validation.py` gives the same bad manifests to both.
"""

from __future__ import annotations

from collections.abc import Iterator

from lora_api.archs import CUSTOM_PREFIX, FRAME_STEP, TEXT_ENCODER_ARCHS, UNET_ARCHS, VIDEO_ARCHS, Arch
from lora_api.cel import objective, optimization, order, parallelism
from lora_api.cel.rule import Rule, listed
from lora_api.config import MUTABLE_CONFIG_PATHS, SINGLE_FILE
from lora_api.locations import HUB_PATTERN
from lora_api.patterns import CUSTOM_ARCH
from lora_api.schema import ITEMS, Path, Schema, at

MUTABLE_SPEC_PATHS: tuple[Path, ...] = (
    ("runPolicy",),
    ("output", "deletionPolicy"),
    *(("config", *path) for path in MUTABLE_CONFIG_PATHS),
)
"""Paths below `spec` of a job that may change at any time; everything else is fixed when the job is created."""


_VIDEO = f"self.model.arch in {listed(sorted(VIDEO_ARCHS))}"
_ONE_FILE = f"self.name_or_path.endsWith('{SINGLE_FILE}')"
_PICTURES_ONLY = "must be 1, because model.arch knows pictures only"


JOB_RULES: tuple[Rule, ...] = (
    Rule(
        on=("spec", "config", "model"),
        rule=f'self.arch in {listed(tuple(Arch))} || self.arch.matches("^{CUSTOM_ARCH}$")',
        message=f"is not one of {', '.join(Arch)}, {CUSTOM_PREFIX}... of a family that you added",
        field="arch",
        reason="FieldValueInvalid",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.train_unet || self.train_text_encoder",
        message="false, and train_text_encoder is false too, so nothing would be trained; set one to true",
        field="train_unet",
    ),
    Rule(
        on=("spec", "config"),
        rule=f"!self.train.train_text_encoder || self.model.arch in {listed(TEXT_ENCODER_ARCHS)}"
        f' || self.model.arch.startsWith("{CUSTOM_PREFIX}")',
        message="true is not supported; set it to false",
        message_expression='"true is not supported for model.arch " + self.model.arch + "; set it to false"',
        field="train.train_text_encoder",
    ),
    Rule(
        on=("spec", "config"),
        rule='!self.train.train_text_encoder || self.network.type == "lora"',
        message="must be lora with train_text_encoder: true, diffusers loads only LoRA into text encoders",
        field="network.type",
    ),
    Rule(
        on=("spec", "config"),
        rule="!self.train.train_text_encoder || self.network.modules.all(m, !has(m.type) || m.type == 'lora')",
        message="the type of each rule must be lora with train_text_encoder: true, diffusers loads only LoRA into text encoders",
        field="network.modules",
    ),
    Rule(
        on=("spec", "config"),
        rule="!self.train.train_text_encoder || self.save.formats == ['diffusers']",
        message="with train_text_encoder: true there is the format diffusers only, the others have no place for text encoders",
        field="save.formats",
    ),
    Rule(
        on=("spec", "config", "network"),
        rule="self.lokr_factor != 0",
        message="0 is neither -1 (most even split) nor a factor of at least 1",
        field="lokr_factor",
    ),
    *(
        Rule(
            on=on,
            rule=f"self.num_frames % {FRAME_STEP} == 1",
            message=f"is not {FRAME_STEP}k + 1 frames",
            field="num_frames",
        )
        for on in (("spec", "config", "datasets", ITEMS), ("spec", "config", "sample"))
    ),
    Rule(
        on=("spec", "config"),
        rule=f"{_VIDEO} || self.datasets.all(dataset, dataset.num_frames == 1)",
        message=f"num_frames of each {_PICTURES_ONLY}",
        field="datasets",
    ),
    Rule(
        on=("spec", "config"),
        rule=f"{_VIDEO} || self.sample.num_frames == 1",
        message=_PICTURES_ONLY,
        field="sample.num_frames",
    ),
    *(
        Rule(
            on=("spec", "config", block, name),
            rule=f"!self.startsWith('hf://') || self.matches(r'{HUB_PATTERN}')",
            message="is not hf://org/repo, hf://org/repo@revision or a file in it",
        )
        for block, name in (
            ("model", "name_or_path"),
            ("model", "extras_name_or_path"),
            ("model", "assistant_lora_path"),
            ("network", "init_from"),
        )
    ),
    Rule(
        on=("spec", "config", "model"),
        rule=f"has(self.extras_name_or_path) || !{_ONE_FILE}",
        message="required, because name_or_path is a single file; give the folder with its other components",
        field="extras_name_or_path",
        reason="FieldValueRequired",
    ),
    Rule(
        on=("spec", "config", "model"),
        rule=f"!has(self.extras_name_or_path) || {_ONE_FILE}",
        message="plays no part, because name_or_path is a folder with all components; remove it",
        field="extras_name_or_path",
    ),
    Rule(
        on=("spec", "config", "network"),
        rule="self.dropout == 0.0 || (self.type in ['lora', 'dora'] && "
        "self.modules.all(m, !has(m.type) || m.type in ['lora', 'dora']))",
        message="is for lora and dora only, but another type is trained too; set it to 0",
        field="dropout",
    ),
    Rule(
        on=("spec", "config", "network"),
        rule="!self.lokr_full_rank || self.modules.all(m, (has(m.type) ? m.type : self.type) != 'lokr' || "
        "(!has(m.linear) && !has(m.linear_alpha)))",
        message="true, and a rule in modules sets linear or linear_alpha for lokr, which would play no part; set it to false",
        field="lokr_full_rank",
    ),
    Rule(
        on=("spec", "config", "network"),
        rule="self.type != 'full' || self.modules.all(m, !has(m.type) && !has(m.linear) && !has(m.linear_alpha))",
        message="type, linear and linear_alpha of a rule mean nothing with network.type full; remove them",
        field="modules",
    ),
    Rule(
        on=("spec", "config", "network", "modules", ITEMS),
        rule="!self.freeze || !(has(self.type) || has(self.linear) || has(self.linear_alpha) || has(self.lr))",
        message="true leaves nothing to set; remove type, linear, linear_alpha and lr from this rule",
        field="freeze",
    ),
    Rule(
        on=("spec", "config", "save"),
        rule="self.formats.all(f, self.formats.exists_one(g, g == f))",
        message="names a format twice; name each once",
        field="formats",
    ),
    *(
        Rule(
            on=("spec", "config"),
            rule=f"self.model.arch != 'wan22' || {rule}",
            message=f"{found} is not supported for model.arch wan22, which has two experts",
            field=field,
        )
        for field, found, rule in (
            ("network.type", "full", "self.network.type != 'full'"),
            ("network.init_from", "an adapter to begin with", "!has(self.network.init_from)"),
            ("save.weights_bin", "true", "!self.save.weights_bin"),
            ("model.assistant_lora_path", "a training adapter", "!has(self.model.assistant_lora_path)"),
        )
    ),
    Rule(
        on=("spec", "config"),
        rule=f"!(self.model.arch in {listed(sorted(UNET_ARCHS))} || self.model.arch.startsWith('{CUSTOM_PREFIX}')) || "
        "self.save.formats.all(f, f in ['diffusers', 'peft'])",
        message="comfyui and kohya are not supported for this model.arch, whose original layers are not known; "
        "leave diffusers and peft",
        field="save.formats",
    ),
    Rule(
        on=("spec", "config"),
        rule="!has(self.model.assistant_lora_path) || (!(self.network.type in ['full', 'dora']) && "
        "self.network.modules.all(m, !has(m.type) || m.type != 'dora'))",
        message="can't be taken out again from under network.type full or dora, which do not only add to the weights; "
        "use lora, lokr or loha",
        field="model.assistant_lora_path",
    ),
    Rule(
        on=("spec", "config"),
        rule="self.network.type != 'full' || self.save.formats == ['diffusers']",
        message="network.type full ends in a whole denoiser, which has the format diffusers only",
        field="save.formats",
    ),
    Rule(
        on=("spec", "config"),
        rule="!has(self.model.quantize) || self.network.type != 'full'",
        message="quantised weights can't be trained; remove it, or use another network.type than full",
        field="model.quantize",
    ),
    Rule(
        on=("spec", "config"),
        rule="!has(self.model.quantize_te) || !self.train.train_text_encoder",
        message="is for text encoders that are let go after captions are encoded, but train.train_text_encoder is true; remove it",
        field="model.quantize_te",
    ),
    Rule(
        on=("spec", "config"),
        rule="self.model.offload_blocks == 0.0 || self.network.type != 'full'",
        message="is for weights that stay as they are, not for network.type full; set it to 0",
        field="model.offload_blocks",
    ),
    Rule(
        on=("spec", "config"),
        rule="self.model.offload_blocks == 0.0 || !self.train.compile",
        message="can't be combined with train.compile: true; set one of them back",
        field="model.offload_blocks",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.gradient_checkpointing_every == 1 || self.gradient_checkpointing",
        message="plays no part, because gradient_checkpointing is false; set that to true",
        field="gradient_checkpointing_every",
    ),
    Rule(
        on=("spec", "output", "path"),
        rule='!self.matches("(^|/)[.]+(/|$)")',
        message="has a segment of dots only",
    ),
    *optimization.RULES,
    *objective.RULES,
    *order.RULES,
    *parallelism.RULES,
)

PROFILE_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            on=("spec", "stores", ITEMS),
            rule=f'self.type != "{kind}" || has(self.{field})',
            message=f"required for a store of type {kind}",
            field=field,
            reason="FieldValueRequired",
        )
        for kind, field in (("s3", "endpoint"), ("s3", "bucket"), ("directory", "directory"))
    ),
)


def immutable(crd_schema: Schema) -> Iterator[Rule]:
    """One rule for each field of a job's spec that is fixed, on its parent, so that adding and removing it is caught too.

    Lists are compared whole: their items have no identity that a rule could follow.
    """
    yield from _immutable(at(crd_schema, ("spec",)), ())


def _immutable(node: Schema, below_spec: Path) -> Iterator[Rule]:
    for name, child in node["properties"].items():
        path = (*below_spec, name)
        if path in MUTABLE_SPEC_PATHS:
            continue
        always_there = name in node.get("required", ()) or "default" in child
        if child["type"] == "object":
            assert always_there, f"spec.{'.'.join(path)}: a transition rule inside it would not see it come and go"
            yield from _immutable(child, path)
        else:
            yield _fixed(("spec", *below_spec), name, child["type"], always_there=always_there)


def _fixed(parent: Path, name: str, kind: str, *, always_there: bool) -> Rule:
    same = f"self.{name} == oldSelf.{name}"
    advice = "what defines the run is fixed once the job exists; create a new job"
    if (*parent, name) == ("spec", "config", "train", "stages"):
        same, advice = order.same_stages(), f"{advice}. Only steps of the last stage may change, with train.steps"
    if not always_there:
        same = f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {same})"
    said = None
    if kind != "array":
        values = ", ".join(_shown(whose, name, always_there=always_there) for whose in ("self", "oldSelf"))
        said = f'"found %s, but the job was created with %s; {advice}".format([{values}])'
    return Rule(
        parent, same, f"differs from what the job was created with; {advice}", said, name, "FieldValueForbidden"
    )


def _shown(whose: str, name: str, *, always_there: bool) -> str:
    """The value in words. `format` takes any type, and unlike `+` its cost is not estimated from unbounded strings."""
    return f"{whose}.{name}" if always_there else f'has({whose}.{name}) ? string({whose}.{name}) : "unset"'


def attach(crd_schema: Schema, rules: Iterator[Rule] | tuple[Rule, ...]) -> None:
    """Puts each rule on its node, after those that are there."""
    for rule in rules:
        at(crd_schema, rule.on).setdefault("x-kubernetes-validations", []).append(rule.manifest())
