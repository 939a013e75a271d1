"""Prompts of samples that were changed while the job trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from lora_trainer.data.cache import text_key
from lora_trainer.families.evaluating import evaluating
from lora_trainer.prepare import Condition, Prepared

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

log = logging.getLogger(__name__)


def take_prompts(
    prepared: Prepared,
    prompts: tuple[str, ...],
    report: Callable[[str], None],
    on_any: Callable[[bool], bool] = bool,
) -> None:
    """Makes `prompts` those that samples are drawn of.

    The text encoders are loaded for those that nobody has encoded yet, and let go again. Where the device has no room for
    them beside what is trained, the prompts stay as they were: training is worth more than its samples.

    Args:
        prepared: Changed in place.
        prompts: With the trigger word in its place.
        report: Told what is being done.
        on_any: Whether something is true on any rank that draws: all of them keep the old prompts then, or none does.
    """
    if prompts == prepared.prompts:
        return
    model, cache = prepared.model, prepared.cache
    wanted = dict.fromkeys([*prompts, ""] if prompts else [])
    keys = {text: text_key(text, model.text_identity) for text in wanted}
    new = [text for text in wanted if not cache.holds(keys[text])]
    fresh = None
    with suppress(torch.OutOfMemoryError):
        fresh = _encode(model, new, report)
    if on_any(fresh is None) or fresh is None:
        log.warning("no room for the text encoders: samples are drawn of the old prompts until the next start")
        return
    if not model.trained_text:  # what those compute now is no property of the base model: not for the cache
        for text, condition in fresh.items():
            cache.store(keys[text], condition)
    conditions = {text: fresh[text] if text in fresh else cache.load(keys[text]) for text in wanted}
    prepared.prompts = prompts
    prepared.conditions = [conditions[prompt] for prompt in prompts]
    prepared.negative = conditions.get("")


def _encode(model: BaseModel, texts: Sequence[str], report: Callable[[str], None]) -> dict[str, Condition]:
    if not texts:
        return {}
    encoders = torch.nn.ModuleList(model.text_encoder(part) for part in model.trained_text)
    try:
        found = {}
        for number, text in enumerate(texts, 1):
            report(f"encoding {number}/{len(texts)} new sample prompts")
            with evaluating(encoders):
                found[text] = model.encode_text(text)
        return found
    finally:
        if not model.trained_text:
            model.free_text_encoders()  # samples that are not cached still need the VAE's encoder
