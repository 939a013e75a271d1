"""Finds the family of a `model.arch`: the built-in ones, and what other packages add."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from lora_api.patterns import CUSTOM_ARCH
from lora_trainer.families.family import Family

GROUP = "lora_trainer.families"
"""Entry-point group of third-party families; each entry names a subclass of `Family`."""


def _built_in() -> Iterator[type[Family]]:
    from lora_trainer.families.flux1 import Flux1
    from lora_trainer.families.flux2 import Flux2Klein
    from lora_trainer.families.flux2_dev import Flux2Dev
    from lora_trainer.families.qwen_image import QwenImage
    from lora_trainer.families.sd15 import SD15
    from lora_trainer.families.sdxl import SDXL
    from lora_trainer.families.wan import Wan21, Wan22
    from lora_trainer.families.zimage import ZImage, ZImageTurbo

    yield from (Flux1, Flux2Klein, Flux2Dev, SD15, SDXL, ZImage, ZImageTurbo, QwenImage, Wan21, Wan22)


def _third_party() -> Iterator[type[Family]]:
    for entry in metadata.entry_points(group=GROUP):
        cls = entry.load()
        if not (isinstance(cls, type) and issubclass(cls, Family)):
            raise TypeError(f"entry point {entry.name!r} in {GROUP} names {cls!r}, expected a subclass of Family")
        for arch in cls.arch:
            if not re.fullmatch(CUSTOM_ARCH, arch):
                raise ValueError(
                    f"model.arch {arch!r} of {cls.__qualname__} (entry point {entry.name!r}): found a name that no manifest "
                    f"can hold, expected one like x-mine, that matches {CUSTOM_ARCH}"
                )
        yield cls


def _families() -> dict[str, type[Family]]:
    table: dict[str, type[Family]] = {}
    for cls in (*_built_in(), *_third_party()):
        for arch in cls.arch:
            if table.setdefault(arch, cls) is not cls:
                raise ValueError(
                    f"model.arch {arch!r} is claimed by both {table[arch].__qualname__} and {cls.__qualname__}"
                )
    return table


def known_archs() -> tuple[str, ...]:
    """Every `model.arch` that a family answers to, sorted."""
    return tuple(sorted(_families()))


def family_for(arch: str) -> Family:
    """The family of a `model.arch`.

    Raises:
        ValueError: No family answers to it, or two do.
    """
    table = _families()
    if arch not in table:
        raise ValueError(f"model.arch: found {str(arch)!r}, expected one of {', '.join(sorted(table))}")
    return table[arch](str(arch))
