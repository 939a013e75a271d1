"""Manifests with one mistake each, for the types (exact messages) and for the API server (both must refuse)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from lora_api.job import LoRATrainingJob
from lora_api.profile import LoRATrainingProfile
from tests import bad_memory, bad_objective, bad_optimization, bad_parallelism

JOB: dict[str, Any] = {
    "apiVersion": "lora-operator.io/v1alpha1",
    "kind": "LoRATrainingJob",
    "metadata": {"name": "mascot", "namespace": "default"},
    "spec": {
        "config": {
            "model": {"arch": "zimage", "name_or_path": "s3://models/z-image"},
            "datasets": [{"folder_path": "s3://datasets/mascot"}],
        }
    },
}

WAN22 = {"arch": "wan22", "name_or_path": "s3://models/wan"}

PROFILE: dict[str, Any] = {
    "apiVersion": "lora-operator.io/v1alpha1",
    "kind": "LoRATrainingProfile",
    "metadata": {"name": "default"},
    "spec": {
        "stores": [{"name": "default", "endpoint": "http://minio:9000", "bucket": "runs"}],
        "trainer": {"image": "trainer:1"},
    },
}

ABSENT = object()


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `document` with `value` at `path` (parts by dots, list items as numbers); ABSENT removes the key."""
    result = copy.deepcopy(document)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    node: Any = result
    for part in parents:
        node = node[part] if isinstance(part, int) else node.setdefault(part, {})
    if value is ABSENT:
        del node[last]
    else:
        node[last] = copy.deepcopy(value)
    return result


@dataclass(frozen=True)
class Bad:
    """A good manifest with `value` at `path`.

    Attributes:
        path: Where the mistake is made.
        value: What is put there.
        message: What the types say: the field's path, and the words.
        named: The field that the API server names, when it is another one.
        profile: Whether the manifest is a profile.
        server: Whether the API server can see the mistake.
    """

    path: str
    value: Any
    message: str
    named: str | None = None
    profile: bool = False
    server: bool = True

    @property
    def kind(self) -> type[LoRATrainingJob | LoRATrainingProfile]:
        """The type that has to refuse it."""
        return LoRATrainingProfile if self.profile else LoRATrainingJob

    @property
    def manifest(self) -> dict[str, Any]:
        """The bad manifest."""
        return changed(PROFILE if self.profile else JOB, self.path, self.value)

    @property
    def field(self) -> str:
        """The field that has to be named."""
        return self.named or self.message.partition(": ")[0]

    def __str__(self) -> str:
        return f"{self.path}={'ABSENT' if self.value is ABSENT else str(self.value)[:30]}"


def _bad(path: str, value: Any, message: str, **more: Any) -> Bad:
    """`message` without its field's path, where that is the path of the mistake."""
    where = ".".join(path.split("."))
    for number in range(10):
        where = where.replace(f".{number}", f"[{number}]")
    return Bad(path, value, f"{where}: {message}" if not message.startswith("spec.") else message, **more)


PATH_WORDS = "expected a path such as team-a/mascot: letters, digits, '.', '_' and '-', parted by '/'"
STORE = PROFILE["spec"]["stores"][0]

UNKNOWN_FIELDS = [
    _bad("spec.config.save.max_step_save", 3, "unknown field; did you mean max_step_saves?"),
    _bad("spec.config.save.max_step_saves_to_keep", 3, "unknown field; did you mean max_step_saves?"),
    _bad("spec.config.network.rank", 4, "unknown field; did you mean linear?"),
    _bad("spec.config.datasets.0.caption_dropout_rate", 0.1, "unknown field; did you mean caption_dropout?"),
    _bad("spec.config.steps", 9, "unknown field; did you mean spec.config.train.steps?"),
    _bad("spec.config.rank", 9, "unknown field; did you mean spec.config.network.linear?"),
    _bad("spec.config.resolution", 9, "unknown field; did you mean spec.config.datasets[].resolution?"),
    _bad("spec.config.train.save_every", 9, "unknown field; did you mean spec.config.save.save_every?"),
    _bad("spec.config.train.nothing_like_it", 9, "unknown field"),
    _bad("spec.output.deletion_policy", "Delete", "unknown field; did you mean deletionPolicy?"),
    _bad("spec.runPolicy.backofflimit", 3, "unknown field; did you mean backoffLimit?"),
    _bad("spec.runpolicy", {}, "unknown field; did you mean runPolicy?"),
    _bad("spec.queueName", "gpu", "unknown field; did you mean spec.runPolicy.queueName?"),
    _bad("spec.trainer.shared_memory", "1Gi", "unknown field; did you mean sharedMemory?", profile=True),
]

TYPES = [
    _bad("spec.config.train.lr", "1e-4", 'found "1e-4" (string), expected a number; write 0.0001'),
    _bad("spec.config.train.lr", True, "found true (boolean), expected a number"),
    _bad("spec.config.train.lr", float("nan"), "NaN is not a finite number", server=False),
    _bad("spec.config.train.lr", float("inf"), "Infinity is not a finite number", server=False),
    _bad("spec.config.train.steps", 1.5, "found 1.5 (number), expected a whole number"),
    _bad("spec.config.train.steps", "9", 'found "9" (string), expected a whole number; write 9'),
    _bad("spec.config.train.train_unet", "no", 'found "no" (string), expected true or false; write false'),
    _bad("spec.runPolicy.suspend", "true", 'found "true" (string), expected true or false; write true'),
    _bad("spec.config.model", [], "found [] (list), expected an object"),
    _bad("spec.config.datasets", {}, "found {} (object), expected a list"),
    _bad(
        "spec.config.datasets",
        ["a"],
        'spec.config.datasets[0]: found "a" (string), expected an object; write {folder_path: "a"}',
    ),
    _bad("spec.config.datasets.0.resolution", 512, "found 512 (number), expected a list; write [512]"),
    _bad(
        "spec.config.datasets.0.resolution",
        ["x"],
        'spec.config.datasets[0].resolution[0]: found "x" (string), expected a whole number',
    ),
    _bad("spec.config.network.only_if_contains", "attn", 'found "attn" (string), expected a list; write ["attn"]'),
    _bad(
        "spec.trainer.env", {"A": 1}, 'spec.trainer.env.A: found 1 (number), expected a string; write "1"', profile=True
    ),
    _bad("spec.trainer.nodeSelector", ["a"], 'found ["a"] (list), expected an object', profile=True),
    _bad("spec", 3, "found 3 (number), expected an object"),
]

CHOICES = [
    _bad("spec.config.train.dtype", "bfloat16", '"bfloat16" is not one of bf16, fp16, fp32, auto; did you mean bf16?'),
    _bad("spec.config.train.dtype", "fp8", '"fp8" is not one of bf16, fp16, fp32, auto'),
    _bad("spec.config.device", "gpu", '"gpu" is not one of auto, cuda, cpu; did you mean cuda?'),
    _bad("spec.config.network.type", "locon", '"locon" is not one of lora, lokr, loha, dora, full; did you mean lora?'),
    _bad(
        "spec.config.network.modules",
        [{"match": "*", "type": "full"}],
        'spec.config.network.modules[0].type: "full" is not one of lora, lokr, loha, dora',
    ),
    _bad(
        "spec.config.save.formats",
        ["a1111"],
        'spec.config.save.formats[0]: "a1111" is not one of diffusers, peft, comfyui, kohya',
    ),
    _bad("spec.output.deletionPolicy", "delete", '"delete" is not one of Retain, Delete; did you mean Delete?'),
    _bad("spec.config.type", "sd_trainer", 'found "sd_trainer", expected diffusion_trainer'),
    _bad("spec.stores.0.type", "gcs", '"gcs" is not one of s3, directory', profile=True),
]

ARCHS = (
    "flux1, flux2_klein_4b, flux2_klein_9b, flux2_dev, sd15, sdxl, zimage, zimage:turbo, qwen_image, wan21, wan22, "
    "x-... of a family that you added"
)

ARCH = [
    _bad("spec.config.model.arch", "zimge", f'"zimge" is not one of {ARCHS}; did you mean zimage?'),
    _bad("spec.config.model.arch", "SDXL", f'"SDXL" is not one of {ARCHS}; did you mean sdxl?'),
    _bad("spec.config.model.arch", "x-", f'"x-" is not one of {ARCHS}'),
    _bad("spec.config.model.arch", "x-My Model", f'"x-My Model" is not one of {ARCHS}'),
    _bad("spec.config.model.arch", "x-" + "a" * 62, "has 64 characters; expected at most 63"),
]

LIMITS = [
    _bad("spec.config.save.max_step_saves", 0, "0 is below the minimum 1"),
    _bad("spec.config.train.steps", 100_000_000, "100000000 is above the maximum 10000000"),
    _bad("spec.config.train.lr", 0, "0 is too small; expected a value above 0"),
    _bad("spec.config.train.lr", 11, "11 is above the maximum 10"),
    _bad("spec.config.network.dropout", 1, "1 is too large; expected a value below 1"),
    _bad("spec.config.datasets.0.caption_dropout", 1.5, "1.5 is above the maximum 1"),
    _bad("spec.config.sample.width", 500, "found 500 (number), expected a multiple of 16"),
    _bad(
        "spec.config.datasets.0.resolution", [16], "spec.config.datasets[0].resolution[0]: 16 is below the minimum 32"
    ),
    _bad("spec.resources.nodes", 0, "0 is below the minimum 1"),
    _bad("spec.runPolicy.oomPolicy", "shrink", '"shrink" is not one of Shrink, Retry, Fail; did you mean Shrink?'),
    _bad("spec.runPolicy.stallTimeoutSeconds", -1, "-1 is below the minimum 0"),
    _bad("spec.config.datasets", [], "is empty; expected at least 1 item"),
    _bad("spec.config.datasets.0.resolution", [], "is empty; expected at least 1 item"),
    _bad("spec.config.network.only_if_contains", ["a"] * 65, "has 65 items; expected at most 64"),
    _bad("spec.config.model.name_or_path", "", "is empty; expected at least 1 character"),
    _bad("spec.config.trigger_word", "x" * 300, "has 300 characters; expected at most 256"),
    _bad("spec.stores", [], "is empty; expected at least 1 item", profile=True),
]

TEXTS = [
    _bad("spec.config.model.name_or_path", "a\nb", "control characters and line breaks are not allowed"),
    _bad("spec.config.trigger_word", "a\tb", "control characters and line breaks are not allowed"),
    _bad(
        "spec.config.sample.prompts",
        ["a\nb"],
        "spec.config.sample.prompts[0]: control characters and line breaks are not allowed",
    ),
    _bad("spec.output.path", "/a", f'found "/a", {PATH_WORDS}'),
    _bad("spec.output.path", "a b", f'found "a b", {PATH_WORDS}'),
    _bad("spec.output.path", "x" * 513, "has 513 characters; expected at most 512"),
    _bad("spec.output.path", "../other-team", "'../other-team' has a segment of dots only"),
    _bad("spec.output.path", "a/./b", "'a/./b' has a segment of dots only"),
    _bad("spec.output.path", "a/...", "'a/...' has a segment of dots only"),
    _bad(
        "spec.profile",
        "My Profile",
        "found \"My Profile\", expected lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
    ),
    _bad("spec.resources.memory", "lots", 'found "lots", expected a quantity of memory such as 32Gi'),
    _bad("spec.resources.cpu", "4 cores", 'found "4 cores", expected a quantity of CPU such as "4" or "500m"'),
    _bad(
        "spec.stores.0.endpoint",
        "minio:9000",
        'found "minio:9000", expected a URL without a path, such as https://minio.storage.svc:9000',
        profile=True,
    ),
    _bad(
        "spec.stores.0.bucket",
        "UP",
        "found \"UP\", expected a bucket name: 3 to 63 lower-case letters, digits, '-' and '.'",
        profile=True,
    ),
]

MISSING = [
    _bad("spec.config.model.arch", ABSENT, "is required, but missing"),
    _bad("spec.config.model", ABSENT, "is required, but missing"),
    _bad("spec.config.model", None, "is required, but missing"),
    _bad("spec.config.datasets", [{}], "spec.config.datasets[0].folder_path: is required, but missing"),
    _bad("spec.config", ABSENT, "is required, but missing"),
    _bad("spec", ABSENT, "is required, but missing"),
    _bad("spec.trainer", ABSENT, "is required, but missing", profile=True),
    _bad("spec.stores.0.name", ABSENT, "is required, but missing", profile=True),
]

CROSS_FIELD = [
    _bad(
        "spec.config.network",
        {"type": "lokr", "dropout": 0.1},
        "spec.config.network.dropout: 0.1 is for lora and dora only, but lokr is trained too; set it to 0",
    ),
    _bad(
        "spec.config.network",
        {"dropout": 0.1, "modules": [{"match": "*attn*", "type": "loha"}]},
        "spec.config.network.dropout: 0.1 is for lora and dora only, but loha is trained too; set it to 0",
    ),
    _bad(
        "spec.config.network.modules",
        [{"match": "*attn*", "type": "lokr", "linear": 4}],
        "spec.config.network.lokr_full_rank: true, and a rule in modules sets linear or linear_alpha for lokr, which would "
        "play no part; set it to false",
    ),
    _bad(
        "spec.config.network",
        {"type": "full", "modules": [{"match": "*attn*", "linear": 4}]},
        "spec.config.network.modules: type, linear and linear_alpha of a rule mean nothing with network.type full; remove them",
    ),
    _bad(
        "spec.config.network.modules",
        [{"match": "*attn*", "freeze": True, "lr": 0.1}],
        "spec.config.network.modules[0].freeze: true leaves nothing to set; remove type, linear, linear_alpha and lr from "
        "this rule",
    ),
    _bad("spec.config.save.formats", ["peft", "peft"], "names a format twice; name each once"),
    _bad(
        "spec.config",
        JOB["spec"]["config"] | {"network": {"type": "full"}, "save": {"formats": ["kohya"]}},
        "spec.config.save.formats: network.type full ends in a whole denoiser, which has the format diffusers only",
    ),
    *(
        _bad(
            "spec.config",
            JOB["spec"]["config"] | {"model": WAN22} | blocks,
            f"spec.config.{found} is not supported for model.arch wan22, which has two experts",
        )
        for blocks, found in (
            ({"network": {"type": "full"}}, "network.type: full"),
            ({"network": {"init_from": "s3://runs/a.safetensors"}}, "network.init_from: s3://runs/a.safetensors"),
            ({"save": {"weights_bin": True}}, "save.weights_bin: true"),
            ({"model": WAN22 | {"assistant_lora_path": "a.safetensors"}}, "model.assistant_lora_path: a.safetensors"),
        )
    ),
    *(
        _bad(
            "spec.config",
            JOB["spec"]["config"]
            | {"network": network, "model": JOB["spec"]["config"]["model"] | {"assistant_lora_path": "a.safetensors"}},
            "spec.config.model.assistant_lora_path: can't be taken out again from under network.type full or dora, which do "
            "not only add to the weights; use lora, lokr or loha",
        )
        for network in ({"type": "full"}, {"modules": [{"match": "*attn*", "type": "dora"}]})
    ),
    _bad("spec.config.network.lokr_factor", 0, "0 is neither -1 (most even split) nor a factor of at least 1"),
    _bad(
        "spec.config.train.train_unet",
        False,
        "false, and train_text_encoder is false too, so nothing would be trained; set one to true",
    ),
    _bad("spec.config.train.train_text_encoder", True, "true is not supported for model.arch zimage; set it to false"),
    _bad("spec.config.datasets.0.num_frames", 16, "16 is not 4k + 1 frames; write 17"),
    _bad("spec.config.sample.num_frames", 24, "24 is not 4k + 1 frames; write 25"),
    _bad(
        "spec.config.datasets.0.num_frames",
        9,
        "9, but model.arch zimage knows pictures only; set it to 1",
        named="spec.config.datasets",
    ),
    _bad("spec.config.sample.num_frames", 9, "9, but model.arch zimage knows pictures only; set it to 1"),
    _bad(
        "spec.config.model.name_or_path",
        "s3://models/z-image.safetensors",
        "spec.config.model.extras_name_or_path: required, because name_or_path is a single file; give the folder with its "
        "other components",
    ),
    *(
        _bad(
            f"spec.config.{name}",
            "hf://Z-Image",
            "found 'hf://Z-Image', expected hf://org/repo, hf://org/repo@revision or a file in it",
        )
        for name in (
            "model.name_or_path",
            "model.extras_name_or_path",
            "model.assistant_lora_path",
            "network.init_from",
        )
    ),
    _bad(
        "spec.config.model.extras_name_or_path",
        "s3://models/z-image",
        "plays no part, because name_or_path is a folder with all components; remove it",
    ),
    *(
        _bad(
            "spec.config",
            JOB["spec"]["config"]
            | {"model": {"arch": "sd15", "name_or_path": "s3://models/sd15"}, "train": {"train_text_encoder": True}}
            | blocks,
            f"spec.config.{message}",
        )
        for blocks, message in (
            (
                {"network": {"type": "lokr"}},
                "network.type: must be lora with train_text_encoder: true, diffusers loads only LoRA into text encoders",
            ),
            (
                {"network": {"modules": [{"match": "*attn*", "type": "dora"}]}},
                (
                    "network.modules: the type of each rule must be lora with train_text_encoder: true, diffusers loads only LoRA "
                    "into text encoders"
                ),
            ),
            (
                {"save": {"formats": ["diffusers", "peft"]}},
                (
                    "save.formats: with train_text_encoder: true there is the format diffusers only, the others have no place for "
                    "text encoders"
                ),
            ),
        )
    ),
    *(
        _bad(
            "spec.config",
            JOB["spec"]["config"]
            | {"model": {"arch": arch, "name_or_path": "s3://models/a"}, "save": {"formats": ["diffusers", form]}},
            f"spec.config.save.formats: comfyui and kohya are not supported for model.arch {arch}, whose original layers are "
            "not known; leave diffusers and peft",
        )
        for arch, form in (("sdxl", "kohya"), ("x-mine", "comfyui"))
    ),
    _bad(
        "spec.config.train.stages",
        [{"lr": 1e-3}, {"steps": 6000}],
        "spec.config.train.stages[0].steps: required for every stage but the last, which may go on until train.steps",
        named="spec.config.train.stages",
    ),
    *(
        _bad(
            "spec.config.train",
            {"steps": 9000, "stages": [{"steps": a}, {"steps": b}]},
            f"spec.config.train.stages: {said}",
        )
        for a, b, said in (
            (
                3000,
                5000,
                (
                    "have 8000 steps in all, but train.steps is 9000; make both the same, or leave steps out of the last "
                    "stage, which then goes on until train.steps"
                ),
            ),
            (
                3000,
                7000,
                (
                    "have 10000 steps in all, but train.steps is 9000; make both the same, or leave steps out of the last "
                    "stage, which then goes on until train.steps"
                ),
            ),
            (
                9000,
                None,
                "take 9000 steps before the last one, which leaves none of train.steps: 9000 for it; set train.steps above 9000",
            ),
        )
    ),
    _bad(
        "spec.config.train.stages",
        [{"steps": 9, "lr_scheduler_params": {"num_cycles": 2}}],
        "spec.config.train.stages[0].lr_scheduler_params: plays no part without an lr_scheduler of this stage; remove it, or "
        "set that too",
        named="spec.config.train.stages",
    ),
    _bad(
        "spec.config.train.stages",
        [{"steps": 9, "lr_scheduler": "cosine_with_restarts"}],
        "spec.config.train.stages[0].lr_scheduler_params: 1 cycle never restarts; set num_cycles to 2 or more with "
        "lr_scheduler cosine_with_restarts, or choose cosine",
        named="spec.config.train.stages",
    ),
    *(
        _bad(
            "spec.config.train",
            {"optimizer": optimizer, "lr": 1.0, "stages": [{"steps": 9} | stage]},
            f"spec.config.train.stages[0].{said}",
            named="spec.config.train.stages",
        )
        for optimizer, stage, said in (
            (
                "prodigy",
                {"lr": 1e-4},
                "lr: 0.0001, but with optimizer prodigy it is a factor on the rate that prodigy finds; set it to 1.0",
            ),
            (
                "schedule_free_adamw",
                {"lr_scheduler": "cosine"},
                (
                    "lr_scheduler: cosine, but optimizer schedule_free_adamw averages in place of a schedule; set constant, with "
                    "a warm-up"
                ),
            ),
        )
    ),
    _bad(
        "spec.config.datasets.0.weight",
        [{"at_step": 5, "value": 1}, {"at_step": 5, "value": 2}],
        "at_step 5 follows 5; give the points in the order of their steps",
    ),
    _bad(
        "spec.config.datasets",
        [{"folder_path": "s3://datasets/a", "weight": [{"value": 1}]}, {"folder_path": "s3://datasets/b"}],
        "spec.config.datasets[1].weight: is missing, and datasets[0] has one; weights count relative to each other, so give "
        "every dataset one, or none",
        named="spec.config.datasets",
    ),
    _bad(
        "spec.config.datasets.0.weight",
        [{"value": 0}],
        "0 at step 0, and so is that of every dataset; let one of them be above 0",
        named="spec.config.datasets",
    ),
    _bad(
        "spec.config.datasets.0.weight",
        [{"value": 1}, {"at_step": 9, "value": 0}],
        "0 at step 9, and so is that of every dataset; let one of them be above 0",
        server=False,
    ),
    _bad(
        "spec.config.datasets.0.is_reg",
        True,
        "true in every dataset, so there is nothing to learn; set it to false in one",
        named="spec.config.datasets",
    ),
    _bad(
        "spec.config.train.stages",
        [{"steps": 3000}, {}],
        "take 3000 steps before the last one, which leaves none of train.steps: 1000 for it; set train.steps above 3000",
    ),
    _bad("spec.stores.0.endpoint", ABSENT, "required for a store of type s3", profile=True),
    _bad("spec.stores.0.bucket", ABSENT, "required for a store of type s3", profile=True),
    _bad(
        "spec.stores.0.type",
        "directory",
        "spec.stores[0].directory: required for a store of type directory",
        profile=True,
    ),
    _bad(
        "spec.stores",
        [STORE, STORE],
        "spec.stores: the name 'default' is there twice",
        named="spec.stores[1]",
        profile=True,
    ),
]

OPTIMIZATION = [
    _bad("spec.config", JOB["spec"]["config"] | blocks, f"spec.config.{message}", named=named)
    for blocks, message, named in bad_optimization.CASES
]

OBJECTIVE = [
    _bad(
        "spec.config",
        JOB["spec"]["config"] | {"model": {"arch": arch, "name_or_path": "s3://models/a"}, "train": train},
        f"spec.config.train.{message}",
    )
    for arch, train, message in bad_objective.CASES
]

MEMORY = [
    _bad("spec.config", JOB["spec"]["config"] | blocks, f"spec.config.{message}")
    for blocks, message in bad_memory.CASES
]

MASKS = [
    _bad("spec.config.datasets", [{"folder_path": "/d", **dataset}], message)
    for dataset, message in bad_objective.MASKS
]

PARALLELISM = [
    _bad(
        "spec.config",
        JOB["spec"]["config"] | {"train": {"parallelism": "fsdp"}} | blocks,
        f"spec.config.train.parallelism: fsdp is not supported with {why}; set it to ddp",
    )
    for blocks, why in bad_parallelism.CASES
]

BAD = [
    *UNKNOWN_FIELDS,
    *TYPES,
    *CHOICES,
    *ARCH,
    *LIMITS,
    *TEXTS,
    *MISSING,
    *CROSS_FIELD,
    *OPTIMIZATION,
    *OBJECTIVE,
    *MEMORY,
    *MASKS,
    *PARALLELISM,
]
