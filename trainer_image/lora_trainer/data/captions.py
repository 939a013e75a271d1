"""Captions: reading them, and what the trigger word and dropping make of them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from lora_trainer.errors import DataError

TRIGGER_MARK = "[trigger]"


def read_caption(path: Path | None, default: str) -> str:
    """The caption in a file: UTF-8, without byte order mark and outer white space; `default` for none or a blank one.

    Raises:
        DataError: When the file is not UTF-8; names it and the byte.
    """
    if path is None:
        return default
    raw = path.read_bytes()
    without_mark = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = without_mark.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + len(raw) - len(without_mark)
        raise DataError(
            f"{path}: the caption is not UTF-8: byte {offset} is 0x{raw[offset]:02x}; save the file as UTF-8"
        ) from error
    return text.strip() or default


def fill_trigger(text: str, trigger: str | None) -> str:
    """The text with the trigger word in place of `[trigger]`; without a trigger word the mark vanishes."""
    return text.replace(TRIGGER_MARK, trigger or "").strip()


def with_trigger(text: str, trigger: str | None) -> str:
    """The text with `[trigger]` replaced, and the trigger word in front if it is not there at all."""
    text = fill_trigger(text, trigger)
    if not trigger or trigger in text:
        return text
    return f"{trigger}, {text}" if text else trigger


def dropped(trigger: str | None) -> str:
    """What is trained in place of a dropped caption: nothing but the trigger word, as in ai-toolkit."""
    return trigger or ""


def prompts_of(texts: Sequence[str], trigger_word: str | None) -> tuple[str, ...]:
    """Prompts as they are drawn, with the trigger word in its place."""
    return tuple(fill_trigger(text, trigger_word) for text in texts)
