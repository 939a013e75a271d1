"""Rules about model, adapter, files and clips."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from lora_api.archs import VIDEO_ARCHS, Arch, knows_original_layers, trains_text_encoder

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig

Rule: TypeAlias = "Callable[[TrainerConfig], str | None]"


def whole_models_have_one_format(config: TrainerConfig) -> str | None:
    """`network.type: full` is not an adapter, so adapter formats have no place for it."""
    if config.network.type == "full" and set(config.save.formats) != {"diffusers"}:
        return "save.formats: network.type full ends in a whole denoiser, which has the format diffusers only"
    return None


def something_is_trained(config: TrainerConfig) -> str | None:
    """A run that trains nothing is a mistake."""
    if not config.train.train_unet and not config.train.train_text_encoder:
        return (
            "train.train_unet: false, and train_text_encoder is false too, so nothing would be trained; set one to true"
        )
    return None


def text_encoder_can_be_trained(config: TrainerConfig) -> str | None:
    """Adapters of text encoders exist where the family's loader takes them, and of type lora only."""
    if not config.train.train_text_encoder:
        return None
    if not trains_text_encoder(config.model.arch):
        return f"train.train_text_encoder: true is not supported for model.arch {config.model.arch}; set it to false"
    why = "with train_text_encoder: true, diffusers loads only LoRA into text encoders"
    if config.network.type != "lora":
        return f"network.type: must be lora {why}"
    if any(rule.type not in (None, "lora") for rule in config.network.modules):
        return f"network.modules: the type of each rule must be lora {why}"
    if set(config.save.formats) != {"diffusers"}:
        return (
            "save.formats: with train_text_encoder: true there is the format diffusers only, the others have no place "
            "for text encoders"
        )
    return None


def two_experts_are_trained_with_fresh_adapters(config: TrainerConfig) -> str | None:
    """What the family of two experts can't do."""
    if config.model.arch != Arch.WAN22:
        return None
    refused = {
        "network.type: full": config.network.type == "full",
        f"network.init_from: {config.network.init_from}": config.network.init_from is not None,
        "save.weights_bin: true": config.save.weights_bin,
        f"model.assistant_lora_path: {config.model.assistant_lora_path}": config.model.assistant_lora_path is not None,
    }
    for found, is_so in refused.items():
        if is_so:
            return f"{found} is not supported for model.arch wan22, which has two experts"
    return None


def formats_are_known_for_the_family(config: TrainerConfig) -> str | None:
    """Formats with a model's original names need to know them."""
    if not knows_original_layers(config.model.arch) and not set(config.save.formats) <= {"diffusers", "peft"}:
        return (
            f"save.formats: comfyui and kohya are not supported for model.arch {config.model.arch}, whose original layers "
            "are not known; leave diffusers and peft"
        )
    return None


def assistants_need_additive_adapters(config: TrainerConfig) -> str | None:
    """A training adapter is taken out again for samples, from under the adapter that is trained."""
    types = {config.network.type, *(rule.type for rule in config.network.modules if rule.type is not None)}
    if config.model.assistant_lora_path is not None and types & {"full", "dora"}:
        return (
            "model.assistant_lora_path: can't be taken out again from under network.type full or dora, which do not "
            "only add to the weights; use lora, lokr or loha"
        )
    return None


def quantised_weights_are_not_trained(config: TrainerConfig) -> str | None:
    """Weights of eight bits and less take no updates."""
    if config.model.quantize is not None and config.network.type == "full":
        return f"model.quantize: {config.model.quantize} weights can't be trained; remove it, or use another network.type than full"
    if config.model.quantize_te is not None and config.train.train_text_encoder:
        return (
            f"model.quantize_te: {config.model.quantize_te} is for text encoders that are let go after captions are encoded, but "
            "train.train_text_encoder is true; remove it"
        )
    return None


def resting_blocks_are_not_trained_nor_compiled(config: TrainerConfig) -> str | None:
    """Weights that come and go have no place for updates, and compiled code expects them to stay."""
    share = config.model.offload_blocks
    if share and config.network.type == "full":
        return f"model.offload_blocks: {share:g} is for weights that stay as they are, not for network.type full; set it to 0"
    if share and config.train.compile:
        return f"model.offload_blocks: {share:g} can't be combined with train.compile: true; set one of them back"
    return None


def skipped_blocks_need_checkpointing(config: TrainerConfig) -> str | None:
    """Every n-th of nothing is a mistake."""
    every = config.train.gradient_checkpointing_every
    if every > 1 and not config.train.gradient_checkpointing:
        return f"train.gradient_checkpointing_every: {every} plays no part, because gradient_checkpointing is false; set that to true"
    return None


def clips_need_a_video_family(config: TrainerConfig) -> str | None:
    """Several frames for families of pictures would be ignored."""
    if config.model.arch in VIDEO_ARCHS:
        return None
    blocks = [*((f"datasets[{n}]", each.num_frames) for n, each in enumerate(config.datasets))]
    for name, frames in [*blocks, ("sample", config.sample.num_frames)]:
        if frames > 1:
            return f"{name}.num_frames: {frames}, but model.arch {config.model.arch} knows pictures only; set it to 1"
    return None


RULES: tuple[Rule, ...] = (
    whole_models_have_one_format,
    something_is_trained,
    text_encoder_can_be_trained,
    two_experts_are_trained_with_fresh_adapters,
    formats_are_known_for_the_family,
    assistants_need_additive_adapters,
    clips_need_a_video_family,
    quantised_weights_are_not_trained,
    resting_blocks_are_not_trained_nor_compiled,
    skipped_blocks_need_checkpointing,
)
"""In the order in which they are asked."""
