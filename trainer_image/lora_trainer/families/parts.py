"""The components of a pipeline that are trained, and what their layers are called.

A layer has three names. Inside its component it has its own, `blocks.0.attn.to_q`. In the trainer it has the same where
the denoiser is one component, else its component is put in front. In configurations and checkpoints the component is
always in front: `transformer.blocks.0.attn.to_q`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

CLIP_LEAD = "text_model."
TEXT_ENCODER = "text_encoder"
"""Begins the names of components that encode captions."""


@dataclass(frozen=True)
class Part:
    """One such component.

    Attributes:
        name: Of the component in the pipeline.
        module: The component.
        targets: The layers that adapters change unless told otherwise, by their names inside the component.
        prefix: In front of these names in the trainer.
        ending: Of the name of the adapter file that holds it, before the suffix.
        lead: In front of the layers' names outside of the component, whether or not they have it inside: CLIP's text
            encoders lost it in newer versions of transformers, and programs know them by it.
    """

    name: str
    module: nn.Module
    targets: tuple[str, ...] = ()
    prefix: str = ""
    ending: str = ""
    lead: str = ""

    @property
    def encodes_text(self) -> bool:
        """Whether it is a text encoder; else it is the denoiser, or one of its experts."""
        return self.name.startswith(TEXT_ENCODER)

    @property
    def file_prefix(self) -> str:
        """In front of the names of `bare` in adapter files: diffusers calls the second expert what it calls the first."""
        return f"{'transformer' if self.name == 'transformer_2' else self.name}.{self.lead}"

    def inner(self, layer: str) -> str:
        """The name inside the component, of a name (or a longer key) in the trainer."""
        return layer.removeprefix(self.prefix)

    def bare(self, layer: str) -> str:
        """The same without `lead`: an ending of the name in every version of the component."""
        return self.inner(layer).removeprefix(self.lead)

    def full(self, layer: str) -> str:
        """The name in configurations and checkpoints, of a name (or a longer key) in the trainer."""
        return f"{self.name}.{self.lead}{self.bare(layer)}"


def part_of(parts: Sequence[Part], layer: str) -> Part:
    """The part that a layer (or a longer key) belongs to, by its name in the trainer."""
    return max((part for part in parts if layer.startswith(part.prefix)), key=lambda part: len(part.prefix))


def by_part(parts: Sequence[Part], layers: Iterable[str]) -> list[tuple[Part, list[str]]]:
    """Layers (or longer keys) with the part they belong to; both in the order given, parts without any left out."""
    found = [(part_of(parts, layer), layer) for layer in layers]
    pairs = [(part, [layer for owner, layer in found if owner is part]) for part in parts]
    return [(part, mine) for part, mine in pairs if mine]
