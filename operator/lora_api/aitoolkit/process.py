"""One entry of `config.process`: the blocks put together."""

from __future__ import annotations

import re
from typing import Any

from lora_api.aitoolkit import tables
from lora_api.aitoolkit.findings import Block, Findings
from lora_api.aitoolkit.memory import read_compile
from lora_api.aitoolkit.objective import read_masks
from lora_api.aitoolkit.training import read_model, read_network, read_save, read_train, steps_in_updates
from lora_api.config import SampleConfig, TrainerConfig
from lora_api.datasets import DatasetConfig
from lora_api.wording import short, type_name

TYPES = ("diffusion_trainer", "sd_trainer", "ui_trainer")
"""Their words for training a diffusion model; the older ones mean the same."""

_PROMPT_FLAG = re.compile(r"\s+--[a-z]+\s.*$", re.DOTALL)
_NUMBERED_DEVICE = re.compile(r"cuda:(\d+)")


def read_process(raw: Any, path: str, findings: Findings) -> dict[str, Any]:
    """The trainer's configuration of a process, as plain data that the types have yet to check."""
    block = Block(raw, path, "", findings)
    kind = block.take("type")
    if kind not in TYPES:
        block.problem("type", f"found {short(kind)}, expected {' or '.join(TYPES[:2])}")
    for key in ("training_folder", "name"):
        block.take(key)  # where the caller wants them
    _device(block)
    seed = block.take("training_seed")
    out: dict[str, Any] = {"type": TYPES[0]}
    model = block.inner("model")
    compiled = read_compile(model)
    out["model"], arch = read_model(model)
    out["network"] = _network(block, arch)
    out["datasets"] = _datasets(block, path)
    train = block.inner("train")
    passes, no_samples = train.peek("gradient_accumulation_steps"), train.peek("disable_sampling")
    out["train"] = read_train(train, arch) | ({"seed": seed} if seed is not None else {})
    out["train"] |= {"compile": True} if compiled else {}
    out["save"] = read_save(block.inner("save"))
    has_samples = block.has("sample") and not no_samples
    samples = _read_sample(block.inner("sample"), arch)
    if has_samples:
        out["sample"] = samples
    keys = (("train", "steps"), ("train", "warmup_steps"), ("save", "save_every"), ("sample", "sample_every"))
    for name, key in keys:
        steps_in_updates(out.get(name, {}), name, key, passes, findings)
    block.inner("logging").finish(tables.LOGGING)
    return {**out, **block.finish(tables.PROCESS, TrainerConfig)}


def _device(block: Block) -> None:
    device = block.take("device")
    numbered = _NUMBERED_DEVICE.fullmatch(str(device))
    if numbered:
        block.note(f"device: {device} is cuda here; choose the GPU with CUDA_VISIBLE_DEVICES={numbered[1]}")
    if device is not None:
        block.out["device"] = "cuda" if numbered else device


def _network(block: Block, arch: str) -> dict[str, Any]:
    others = [name for name in ("adapter", "embedding", "slider") if block.has(name)]
    if not block.has("network") and not others:
        block.problem(
            "network", "is missing, which trains the whole model there; add a network block, such as {type: lora}"
        )
    return read_network(block.inner("network"), arch)


def _datasets(block: Block, path: str) -> list[dict[str, Any]]:
    trigger, given = block.peek("trigger_word"), block.take("datasets")
    if given is None:
        return []
    if not isinstance(given, list):
        block.problem("datasets", f"found {short(given)} ({type_name(given)}), expected a list")
        return []
    datasets = [
        _read_dataset(Block(each, f"{path}.datasets[{n}]", f"datasets[{n}]", block.findings), trigger)
        for n, each in enumerate(given)
    ]
    _alternate_with_regularisation(datasets, block)
    return datasets


def _alternate_with_regularisation(datasets: list[dict[str, Any]], block: Block) -> None:
    """Regularisation sets are seen in every second step there, whatever their size."""
    sets = [dataset for dataset in datasets if dataset.get("is_reg") is True]
    if not sets or len(sets) == len(datasets):
        return
    if len(datasets) == 2:
        for dataset in datasets:
            dataset.setdefault("weight", [{"value": 1.0}])
        return
    block.note(
        "datasets[].is_reg: every second step is on regularisation sets there; here each dataset counts by its size, so set "
        "weight in all of them"
    )


def _read_dataset(block: Block, trigger: Any) -> dict[str, Any]:
    own = block.take("trigger_word")
    if own not in (None, "", trigger):
        block.problem(
            "trigger_word", f"{short(own)}: one trigger word for all datasets is supported; set it above them"
        )
    place = block.take("dataset_path")
    if place is not None and not block.has("folder_path"):
        block.out["folder_path"] = place
        if str(place).endswith(".json"):
            block.problem("dataset_path", f"{short(place)}: a list of files is not supported; expected a folder")
    resolution = block.take("resolution")
    if resolution is not None:
        block.out["resolution"] = resolution if isinstance(resolution, list) else [resolution]
    block.rename("caption_dropout_rate", "caption_dropout")
    in_memory, on_disk = block.take("cache_latents"), block.take("cache_latents_to_disk")
    if in_memory is not None or on_disk is not None:
        block.out["cache_latents"] = bool(in_memory or on_disk)
        if in_memory and not on_disk:
            block.note(f"{block.name}.cache_latents: latents are kept on disk here, outside the dataset folder")
    read_masks(block)
    return block.finish(tables.DATASET, DatasetConfig)


def _read_sample(block: Block, arch: str) -> dict[str, Any]:
    for key, value in (("width", 512), ("height", 512), ("sample_steps", 20), ("sample_every", 100), ("seed", 0)):
        if block.has("prompts") or block.has("samples"):
            block.default(key, value)
    if block.has("prompts") or block.has("samples"):
        block.default("guidance_scale", 7)
    prompts = _prompts(block)
    if prompts:
        block.out["prompts"] = prompts
    if block.take("walk_seed") is not True and len(prompts) > 1:
        block.note("sample.walk_seed: every prompt has the same seed there; here the n-th takes seed + n")
    scale = block.peek("guidance_scale")
    if arch == "zimage" and isinstance(scale, int | float):
        block.take("guidance_scale")
        block.out["guidance_scale"] = max(0, scale - 1)
        block.note(
            f"sample.guidance_scale: {short(scale)} is {short(max(0, scale - 1))} here: Z-Image counts it from 0, and the same "
            "is subtracted there"
        )
    return block.finish(tables.SAMPLE, SampleConfig)


def _prompts(block: Block) -> list[Any]:
    """`samples` where there are some, else `prompts`; what a prompt sets for itself alone is said."""
    prompts, samples = block.take("prompts") or [], block.take("samples") or []
    found = list(prompts) if isinstance(prompts, list) else [prompts]
    if samples:
        found = [
            _read_item(each, n, block) for n, each in enumerate(samples if isinstance(samples, list) else [samples])
        ]
    plain = []
    for prompt in found:
        kept = _PROMPT_FLAG.sub("", prompt) if isinstance(prompt, str) else prompt
        if kept != prompt:
            block.note(f"ignored: flags of a prompt: {prompt.removeprefix(kept).strip()} (all samples are drawn alike)")
        plain.append(kept)
    return plain


def _read_item(raw: Any, number: int, block: Block) -> Any:
    item = Block(raw, f"{block.path}.samples[{number}]", f"sample.samples[{number}]", block.findings)
    prompt = item.take("prompt")
    for key in (*SampleConfig.model_fields, "neg", "network_multiplier", "num_frames", "fps"):
        value = item.take(key)
        if value is not None and value != block.peek(key):
            block.note(f"ignored: {item.name}.{key}: {short(value)} (all samples are drawn alike)")
    item.finish(tables.SAMPLE_ITEM)
    return "" if prompt is None else prompt
