"""An adapter inside a base model: its parameters in a fixed order, its state, and the form it is exported in.

It sits in the denoiser, in text encoders, or in both. Layers of the denoiser go by their own dotted names, those of a
text encoder by `text_encoder.<name>`: checkpoints of a denoiser's adapter need no prefix.

Adapter parameters are fp32 whatever the base model is: updates of 1e-4 would vanish in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.networks.spec import build_peft_config, check_filters, resolve_targets

if TYPE_CHECKING:
    from lora_api.config import NetworkConfig
    from lora_trainer.families.base import BaseModel

NAME = "default"
"""peft's name of the adapter that is trained."""

CLIP_PREFIX = "text_model."
"""Stands before the layers of CLIP's text encoders in adapter files, whether or not this version of transformers has it."""

ZERO_AT_START = (".lora_B.", ".lokr_w2.", ".lokr_w2_b.")
"""Factors that start at zero, so that DeltaW is zero and the first output is the base model's."""


def add_adapter(
    model: BaseModel, network: NetworkConfig, *, seed: int, denoiser: bool = True, text_encoders: bool = False
) -> Adapter:
    """Puts a fresh adapter into `model`, in place; the model's output does not change yet.

    The start values depend on `seed` and the layers alone: not on the global generator, which is left as it was, not on
    the base model's number format or device, and those of the denoiser not on the text encoders.

    Args:
        model: A loaded base model without an adapter.
        network: Type, rank, alpha and layers.
        seed: Of the start values.
        denoiser: Whether the denoiser gets one.
        text_encoders: Whether the text encoders get one, those that the family's loader takes; they stay loaded.

    Raises:
        ValueError: The layer filters of `network` match nothing, the family's text encoders can't be trained, or the
            model has an adapter already.
    """
    names: tuple[str, ...] = (model.denoiser_part,) if denoiser else ()
    if text_encoders:
        if not model.trainable_text_parts:
            raise ValueError(
                f"train.train_text_encoder: true is not supported by {type(model).__name__}; set it to false"
            )
        names += model.trainable_text_parts
    modules = {name: model.denoiser if name == model.denoiser_part else model.text_encoder(name) for name in names}
    if any(getattr(module, "peft_config", None) for module in modules.values()):
        raise ValueError("the denoiser has an adapter already" if denoiser else "a text encoder has an adapter already")
    defaults = {n: model.default_targets() if n == model.denoiser_part else model.text_targets(n) for n in names}
    check_filters([f"{part}.{name}" for part, names in defaults.items() for name in names], network)
    chosen = {part: resolve_targets(modules[part], defaults[part], network, part=part) for part in modules}
    parts = []
    for part, module in modules.items():
        config = build_peft_config(network, chosen[part])
        with torch.random.fork_rng(devices=[]):
            module.add_adapter(config, NAME)  # type: ignore[operator]
        parts.append(Part(part, "" if part == model.denoiser_part else f"{part}.", module, config))
    adapter = Adapter(parts)
    assert sorted(adapter.modules) == sorted(f"{p.prefix}{n}" for p in parts for n in chosen[p.name].all), "by peft"
    model.trained_text = tuple(part.name for part in parts if part.prefix)
    adapter.reset(seed)
    return adapter


@dataclass(frozen=True)
class Part:
    """A component with adapter layers.

    Attributes:
        name: The component in the pipeline, and its prefix in adapter files.
        prefix: In front of its layers' names here.
        module: The component.
        config: peft's configuration of its adapter.
    """

    name: str
    prefix: str
    module: nn.Module
    config: Any

    @property
    def is_clip(self) -> bool:
        """Whether it is a text encoder of CLIP."""
        return bool(self.prefix) and type(self.module).__name__.startswith("CLIPText")

    def layers(self) -> Iterator[tuple[str, Any]]:
        """Its adapter layers, sorted by name."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        found = {n: m for n, m in self.module.named_modules() if isinstance(m, BaseTunerLayer)}
        yield from ((f"{self.prefix}{name}", found[name]) for name in sorted(found))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its adapter parameters, sorted by name."""
        found = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        yield from ((f"{self.prefix}{_state_key(name)}", found[name]) for name in sorted(found))


class Adapter:
    """The trained part of a base model.

    Attributes:
        modules: Dotted names of the layers that it changes, sorted within each component, the denoiser's first.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._layers: dict[str, Any] = {name: layer for part in parts for name, layer in part.layers()}
        self.modules = list(self._layers)
        self._parameters = {key: p for part in parts for key, p in part.parameters()}
        for parameter in self._parameters.values():
            parameter.data = parameter.data.float()
        self.train()

    # ------------------------------------------------------------------ parameters and state
    @property
    def module_count(self) -> int:
        """Number of layers it changes."""
        return len(self._layers)

    def parameters(self) -> list[nn.Parameter]:
        """Its fp32 parameters, in the order of `modules` and of names: the order the optimizer's state refers to."""
        return list(self._parameters.values())

    def split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those of the denoiser and those of the text encoders, in the same order."""
        denoiser = [p for part in self._parts if not part.prefix for _, p in part.parameters()]
        return denoiser, [p for part in self._parts if part.prefix for _, p in part.parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The same with the keys of `state_dict`."""
        return list(self._parameters.items())

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the parameters on the CPU, fp32, under peft's keys: `<layer>.lora_A.weight`, `<layer>.lokr_w1`."""
        return {key: parameter.detach().cpu().clone().contiguous() for key, parameter in self._parameters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned, to the bit.

        Raises:
            ValueError: Keys, shapes or number formats are not exactly those of this adapter; nothing is changed then.
        """
        missing = sorted(self._parameters.keys() - state.keys())
        unexpected = sorted(state.keys() - self._parameters.keys())
        if missing or unexpected:
            raise ValueError(
                f"adapter state: {len(missing)} keys are missing ({', '.join(missing[:3])}), "
                f"{len(unexpected)} are unexpected ({', '.join(unexpected[:3])})"
            )
        for key, parameter in self._parameters.items():
            found = state[key]
            if found.shape != parameter.shape or found.dtype != torch.float32:
                raise ValueError(
                    f"adapter state: {key} is {tuple(found.shape)} {found.dtype}, expected {tuple(parameter.shape)} torch.float32"
                )
        for key, parameter in self._parameters.items():
            parameter.copy_(state[key])

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Start values: Kaiming-uniform factors times zero factors, drawn on the CPU in the order of the keys."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for key, parameter in self._parameters.items():
            if any(part in f".{key}." for part in ZERO_AT_START):
                parameter.zero_()
                continue
            start = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            parameter.copy_(start)

    # ------------------------------------------------------------------ behaviour
    def train(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 as torch.nn.Module.train
        """Switches its dropout; nothing else in the base model has a training mode, all of it stays in eval."""
        for layer in self._layers.values():
            layer.eval()
            for dropout in getattr(layer, "lora_dropout", {}).values():
                dropout.train(mode)

    def set_enabled(self, enabled: bool) -> None:  # noqa: FBT001 a switch
        """False: the model answers as the base model; True: with the adapter again."""
        for layer in self._layers.values():
            layer.enable_adapters(enabled=enabled)

    def delta_weight(self, module: str) -> Tensor:
        """DeltaW of one layer, shaped like its weight: (alpha / rank) B A, or (alpha / rank) times the Kronecker product."""
        delta: Tensor = self._layers[module].get_delta_weight(NAME)
        return delta.detach()

    # ------------------------------------------------------------------ export
    def portable_state_dict(self) -> dict[str, Tensor]:
        """The state under the keys of adapter files, with alpha / rank folded into one factor.

        Keys are `unet.<layer>.lora_A.weight` and so on: the component and diffusers' name of the layer. CLIP layers are
        `text_encoder.text_model.<layer>`, the name that every version of diffusers and other programs know.
        """
        state = self.state_dict()
        for module, layer in self._layers.items():
            scale = float(layer.scaling[NAME])
            for factor in (f"{module}.lora_B.weight", f"{module}.lokr_w1"):
                if factor in state:
                    state[factor] *= scale
        return {self._file_key(key): tensor for key, tensor in state.items()}

    def _file_key(self, key: str) -> str:
        part = next((part for part in self._parts if part.prefix and key.startswith(part.prefix)), self._parts[0])
        inner = key.removeprefix(part.prefix)
        if not part.is_clip:
            return f"{part.name}.{inner}"
        return f"{part.name}.{CLIP_PREFIX}{inner.removeprefix(CLIP_PREFIX)}"

    def portable_config(self) -> dict[str, Any]:
        """The peft configurations of `portable_state_dict`: alpha equals the rank. Only what a reader needs, as plain data.

        Keys begin with the component, `unet.r`. Fields that a reader of another version might not know are left out:
        loaders hand all of them to a constructor.
        """
        return {f"{part.name}.{key}": value for part in self._parts for key, value in _portable(part).items()}


def _portable(part: Part) -> dict[str, Any]:
    config = part.config
    # peft takes names as endings: without `text_model.` they fit the versions of transformers that have it and those that don't
    names = [name.removeprefix(part.prefix).removeprefix(CLIP_PREFIX) for name, _ in part.layers()]
    shared: dict[str, Any] = {
        "r": config.r,
        "target_modules": names,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.rank_pattern),
    }
    if hasattr(config, "lora_alpha"):
        return {**shared, "lora_alpha": config.r}
    return {
        **shared,
        "alpha": config.r,
        "decompose_both": config.decompose_both,
        "decompose_factor": config.decompose_factor,
        "use_effective_conv2d": config.use_effective_conv2d,
    }


def _state_key(parameter_name: str) -> str:
    """`a.lora_A.default.weight` to `a.lora_A.weight`; `a.lokr_w1.default` to `a.lokr_w1`."""
    return f"{parameter_name}.".replace(f".{NAME}.", ".", 1).removesuffix(".")
