"""The repeated blocks of a denoiser: what is quantised, kept in CPU memory, or compiled one by one."""

from __future__ import annotations

from torch import nn


def repeated_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks in the order of their names, none inside of another.

    diffusers' classes name them (`_repeated_blocks`, for compiling them one by one); of others, the items of lists of
    modules are taken.
    """
    found: list[nn.Module] = []
    _collect(denoiser, (), found)
    return found


def _collect(module: nn.Module, names: tuple[str, ...], found: list[nn.Module]) -> None:
    names = tuple(getattr(module, "_repeated_blocks", None) or names)
    for child in module.children():
        is_block = type(child).__name__ in names if names else isinstance(module, nn.ModuleList)
        if is_block:
            found.append(child)
        else:
            _collect(child, names, found)
