"""The blocks whose meaning has to be converted: network, train, save and model."""

from __future__ import annotations

import math
import re
from typing import Any

from lora_api.aitoolkit import tables
from lora_api.aitoolkit.findings import Block, Findings
from lora_api.aitoolkit.memory import read_offload, read_quantisation
from lora_api.aitoolkit.objective import UNETS, read_objective
from lora_api.aitoolkit.optimization import read_average, read_optimizer, read_schedule
from lora_api.archs import Arch
from lora_api.config import ModelConfig, SaveConfig
from lora_api.foreign_words import VALUE_ALIASES
from lora_api.network import NetworkConfig
from lora_api.training import TrainConfig
from lora_api.wording import short

OLD_FLAGS = {"is_flux": "flux", "is_xl": "sdxl", "is_v2": "sd2", "is_v3": "sd3"}
OUR_ARCH = {"flux": "flux1", "sd1": "sd15", "flux2": "flux2_dev", "wan22_14b": "wan22"}
"""Their names of families that have another name here; those that the trainer lacks are refused as they stand."""

HUB_SCHEME = "hf://"
"""Begins a location on the Hugging Face Hub; empty: models are local folders or lie in a store."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w./-]+\.safetensors)?")


def precision(value: Any) -> Any:
    """Their word for a number format in ours; others as they are, for the types to refuse."""
    return VALUE_ALIASES.get(value, value) if isinstance(value, str) else value


def read_model(block: Block) -> tuple[dict[str, Any], str]:
    """The base model, and the family's name there (`sd1` where the file names none, as there)."""
    flags = [name for flag, name in OLD_FLAGS.items() if block.take(flag)]
    named = block.take("arch") or (flags[0] if flags else None)
    if named is not None:
        block.out["arch"] = _our_arch(str(named), block)
    dtype = block.take("dtype")
    if dtype is not None:
        block.note(f"ignored: model.dtype: {short(dtype)} (train.dtype counts, as it does there)")
    for key, value in (block.take("model_kwargs") or {}).items():
        if value:
            block.problem(f"model_kwargs.{key}", f"{short(value)} is not supported; remove the key to go on without it")
    extras = block.take("extras_name_or_path")
    if extras is not None and str(block.peek("name_or_path")).endswith(".safetensors"):
        block.out["extras_name_or_path"] = extras
    elif extras is not None:
        block.note(
            f"ignored: model.extras_name_or_path: {short(extras)} (the folder of name_or_path has to hold all components)"
        )
    read_quantisation(block)
    read_offload(block)
    config = block.finish(tables.MODEL, ModelConfig)
    _name_the_places(config, block)
    return config, str(named or "sd1").partition(":")[0]


def _our_arch(named: str, block: Block) -> str:
    known = [str(arch) for arch in Arch]
    plain, colon, _ = named.partition(":")
    for candidate in (named, OUR_ARCH.get(named), plain, OUR_ARCH.get(plain)):
        if candidate in known:
            if colon and candidate != named:
                block.note(f"model.arch: {named!r} is {candidate!r}; what follows the colon has no meaning here")
            return str(candidate)
    return named


def _name_the_places(config: dict[str, Any], block: Block) -> None:
    """What is no place on this machine and looks like `owner/name` is a name on the Hub, as it is there."""
    for key in ("name_or_path", "extras_name_or_path", "assistant_lora_path"):
        place = config.get(key)
        if not isinstance(place, str) or not _HUB_NAME.fullmatch(place) or block.findings.is_local(place):
            continue
        if HUB_SCHEME:
            config[key] = HUB_SCHEME + place
        else:
            block.note(
                f"model.{key}: {place!r} seems to be a name on the Hugging Face Hub; nothing is downloaded here: write the local "
                "folder of the model, or its s3:// location"
            )


def read_network(block: Block, arch: str) -> dict[str, Any]:
    """The adapter. Alpha becomes what counts there: honoured on UNets and for LoKr, the rank everywhere else."""
    kind = block.take("type") or "lora"
    rank, linear = block.take("rank"), block.take("linear")
    alpha, linear_alpha = block.take("alpha"), block.take("linear_alpha")
    block.out["type"] = kind
    rank = linear if rank is None else rank
    if rank is not None:
        block.out["linear"] = rank
    block.default("linear", 4)
    _alphas(block, alpha if linear_alpha is None else linear_alpha, honoured=kind == "lokr" or arch in UNETS)
    if kind == "lokr" and block.has("dropout"):
        block.note(f"ignored: network.dropout: {short(block.take('dropout'))} (it has no effect on LoKr there either)")
    if "init_from" in NetworkConfig.model_fields:
        block.rename("pretrained_lora_path", "init_from")
    layers = block.inner("network_kwargs")
    block.out |= layers.finish(tables.NETWORK_KWARGS, NetworkConfig)
    return block.finish(tables.NETWORK, NetworkConfig)


def _alphas(block: Block, alpha: Any, *, honoured: bool) -> None:
    """Alpha 0 stands for the rank there; where alpha is not honoured, every alpha does."""
    rank, conv, conv_alpha = block.out["linear"], block.take("conv"), block.take("conv_alpha")
    wanted = {"linear": rank} if conv is None else {"linear": rank, "conv": conv}
    given = {"linear": alpha, "conv": conv_alpha}
    if conv is not None:
        block.out["conv"] = conv
    for name, size in wanted.items():
        key, found = f"{name}_alpha", given[name]
        if honoured and name == "linear" and found is None:
            block.default(key, 1.0)
            continue
        block.out[key] = found if honoured and found else size
        if not honoured and found and found != size:
            block.note(
                f"network.{key}: {short(found)} counts as the rank, {short(size)}, on this model there (scale 1), so it is "
                "written that way; here alpha / rank is honoured"
            )


def read_train(block: Block, arch: str) -> dict[str, Any]:
    """The optimisation; `arch` is the family's name there."""
    _accumulation(block)
    for key, value in (("steps", 1000), ("lr", 1e-6), ("gradient_checkpointing", True), ("dtype", "fp32")):
        block.default(key, value)
    _learning_rates(block)
    read_optimizer(block)
    read_schedule(block)
    read_objective(block, arch)
    read_average(block)
    if block.has("dtype"):
        block.out["dtype"] = precision(block.take("dtype"))
    return block.finish(tables.TRAIN, TrainConfig)


def _accumulation(block: Block) -> None:
    summed, counted = block.take("gradient_accumulation"), block.take("gradient_accumulation_steps")
    if (summed or 1) != 1 and (counted or 1) != 1:
        block.problem("gradient_accumulation_steps", "excludes gradient_accumulation; keep one of them")
        return
    number = summed if (summed or 1) != 1 else counted or summed
    if number is not None:
        block.out["gradient_accumulation"] = number
    if isinstance(number, int) and number > 1:
        block.note(
            f"train.gradient_accumulation: {number} forward passes are averaged here and summed there; lr is not rescaled "
            "(AdamW hardly notices the scale of gradients, but max_grad_norm clips them less often here)"
        )


def steps_in_updates(block: dict[str, Any], name: str, key: str, passes: Any, findings: Findings) -> None:
    """`gradient_accumulation_steps` makes every forward pass a step there; here steps are updates."""
    value = block.get(key)
    if isinstance(value, int) and isinstance(passes, int) and passes > 1 and value > 0:
        block[key] = math.ceil(value / passes)
        findings.note(
            f"{name}.{key}: {value} forward passes are {block[key]} updates of {passes} (gradient_accumulation_steps), and "
            "steps are updates here"
        )


def _learning_rates(block: Block) -> None:
    for key in ("unet_lr", "text_encoder_lr"):  # read there, but never handed to the optimizer
        rate = block.take(key)
        if rate is not None and rate != block.peek("lr"):
            block.note(f"ignored: train.{key}: {short(rate)} (train.lr counts for everything, as it does there)")


def read_save(block: Block) -> dict[str, Any]:
    """Checkpoints and export."""
    block.rename("max_step_saves_to_keep", "max_step_saves")
    block.default("save_every", 1000)
    block.default("max_step_saves", 5)
    block.out["dtype"] = precision(block.take("dtype") or "float16")
    return block.finish(tables.SAVE, SaveConfig)
