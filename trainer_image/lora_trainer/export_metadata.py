"""What the headers of adapter files say: our own facts, and the names under which other tools look for them.

References:
    modelspec.*: Stability AI ModelSpec 1.0.0 (`sai_model_spec`). ss_* and sshs_*: sd-scripts, `library/train_util.py` and
    `networks/lora.py`; LyCORIS, `lycoris.kohya`. Checked in tests/trainer/test_formats.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_api.config import TrainerConfig

TITLES = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr", "full": "full fine-tune"}
MODULES = {"lora": "networks.lora", "dora": "lycoris.kohya", "loha": "lycoris.kohya", "lokr": "lycoris.kohya"}


def base_revision(folder: Path) -> str:
    """The commit of a model folder that lies in a Hugging Face cache; empty elsewhere."""
    return folder.name if folder.parent.name == "snapshots" else ""


def header_of(facts: Mapping[str, Any], config: TrainerConfig, *, name: str, completed_at: str) -> dict[str, str]:
    """The header of a final file.

    Args:
        facts: Of the run, plain data; `base_model_hash` among them.
        config: What was trained.
        name: Of the job.
        completed_at: RFC 3339, in UTC.
    """
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    return {**plain, **_modelspec(facts, config, name, completed_at), **_kohya(facts, config, name)}


def _modelspec(facts: Mapping[str, Any], config: TrainerConfig, name: str, completed_at: str) -> dict[str, str]:
    arch = str(config.model.arch).replace("_", "-")
    side = _side(config)
    suffix = "" if config.network.type == "full" else f"/{config.network.type}"
    spec = {
        "sai_model_spec": "1.0.0",
        "architecture": arch + suffix,
        "implementation": "diffusers",
        "title": name,
        "description": f"{TITLES[config.network.type]} of {config.model.name_or_path}, {facts['steps']} steps",
        "date": completed_at,
        "resolution": f"{side}x{side}",
        "trigger_phrase": config.trigger_word or "",
        "usage_hint": f"Write {config.trigger_word} into the prompt." if config.trigger_word else "",
    }
    return {f"modelspec.{key}": value for key, value in spec.items() if value}


def _side(config: TrainerConfig) -> int:
    """The largest resolution."""
    return max(size for dataset in config.datasets for size in dataset.resolution)


def _kohya(facts: Mapping[str, Any], config: TrainerConfig, name: str) -> dict[str, str]:
    """Numbers are text there, and unknown things the word None."""
    network, train = config.network, config.train
    whole = network.type == "full" or (network.type == "lokr" and network.lokr_full_rank)
    arguments = {"algo": network.type, "conv_dim": network.conv, "conv_alpha": network.conv_alpha or network.conv}
    if network.type == "lokr":
        arguments |= {"factor": network.lokr_factor}
    found = {
        "ss_base_model_version": str(config.model.arch),
        "ss_sd_model_name": config.model.name_or_path,
        "ss_sd_model_hash": str(facts.get("base_model_hash", "")),
        "ss_output_name": name,
        "ss_network_module": MODULES.get(network.type, "None"),
        "ss_network_dim": "Dynamic" if network.modules else "None" if whole else str(network.linear),
        "ss_network_alpha": "Dynamic"
        if network.modules
        else "None"
        if whole
        else f"{network.linear_alpha or network.linear:g}",
        "ss_network_dropout": f"{network.dropout:g}" if network.dropout else "None",
        "ss_network_args": json.dumps({key: value for key, value in arguments.items() if value is not None}),
        "ss_learning_rate": f"{train.lr:g}",
        "ss_lr_scheduler": train.lr_scheduler,
        "ss_optimizer": train.optimizer,
        "ss_steps": str(facts["steps"]),
        "ss_max_train_steps": str(train.steps),
        "ss_batch_size_per_device": str(train.batch_size),
        "ss_gradient_accumulation_steps": str(train.gradient_accumulation),
        "ss_mixed_precision": str(facts.get("dtype", train.dtype)),
        "ss_seed": str(train.seed),
        "ss_num_train_images": str(facts["samples"]),
        "ss_optimizer_weight_decay": f"{train.weight_decay:g}",
        "ss_max_grad_norm": f"{train.max_grad_norm:g}",
        "ss_lr_warmup_steps": str(train.warmup_steps),
        "ss_unet_lr": f"{train.lr if train.unet_lr is None else train.unet_lr:g}" if train.train_unet else "None",
        "ss_text_encoder_lr": f"{train.lr if train.text_encoder_lr is None else train.text_encoder_lr:g}"
        if train.train_text_encoder
        else "None",
        "ss_gradient_checkpointing": str(bool(train.gradient_checkpointing)),
        "ss_cache_latents": str(all(dataset.cache_latents for dataset in config.datasets)),
        "ss_caption_dropout_rate": f"{max(dataset.caption_dropout for dataset in config.datasets):g}",
        "ss_resolution": str((_side(config), _side(config))),
        "ss_enable_bucket": "True",
        "ss_training_finished_at": str(facts.get("completed_at", "")),
    }
    if buckets := facts.get("dataset", {}).get("buckets"):
        sizes = [[int(side) for side in name.split("x")[:2]] for name in buckets]
        table = {
            n: {"resolution": size, "count": count}
            for n, (size, count) in enumerate(zip(sizes, buckets.values(), strict=True))
        }
        found |= {"ss_bucket_info": json.dumps({"buckets": table})}
    return found | ({"ss_tag_frequency": json.dumps({"1": {config.trigger_word: 1}})} if config.trigger_word else {})
