"""Adapters inside a base model, of one type or of several: their factors, their start, and their strength."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.families.parts import Part, by_part
from lora_trainer.networks.factors import MAGNITUDE, Factors, start_value
from lora_trainer.networks.portable import file_config
from lora_trainer.networks.spec import Layer, build_peft_configs, plan_layers
from lora_trainer.networks.trainable import Trainable

if TYPE_CHECKING:
    from lora_api.network import NetworkConfig
    from lora_trainer.families.base import BaseModel

NAME = "default"
"""peft's name of the adapter that is trained; the same for all types, so that one switch moves all."""

READ_BY_DIFFUSERS = {"lora", "dora", "lokr"}


def add_adapter(
    model: BaseModel, network: NetworkConfig, *, seed: int, denoiser: bool = True, text_encoders: bool = False
) -> Adapter:
    """Puts fresh adapters into `model`, in place; its output does not change yet.

    dora divides by a norm and multiplies by it again: its first output is the base model's but for rounding.

    The start values depend on `seed` and the layers alone: not on the global generator, which is left as it was, not on
    the base model's number format or device, and those of the denoiser not on the text encoders.

    Args:
        model: A loaded base model without an adapter.
        network: Type, rank, alpha and layers; not `full`.
        seed: Of the start values.
        denoiser: Whether the denoiser gets one.
        text_encoders: Whether the text encoders get one, those that the family's loader takes; they stay loaded.

    Raises:
        ValueError: A filter or a pattern of `network` matches nothing, the family's text encoders can't be trained, or the
            model has an adapter already.
    """
    if text_encoders and not model.trainable_text_parts:
        raise ValueError(f"train.train_text_encoder: true is not supported by {type(model).__name__}; set it to false")
    parts = model.parts(denoiser=denoiser, text_encoders=text_encoders)
    if any(getattr(part.module, "peft_config", None) for part in parts):
        raise ValueError("the denoiser has an adapter already" if denoiser else "a text encoder has an adapter already")
    layers = {layer.name: layer for layer in plan_layers(parts, network)}
    for part, names in by_part(parts, layers):
        mine = tuple(replace(layers[name], name=part.inner(name)) for name in names)
        with torch.random.fork_rng(devices=[]):
            inject(part.module, build_peft_configs(mine, network))
    adapter = Adapter(parts, tuple(layers.values()), network)
    model.trained_text = tuple(part.name for part in parts if part.encodes_text)
    adapter.reset(seed)
    return adapter


def inject(denoiser: nn.Module, configs: list[Any]) -> None:
    """Puts adapters of several configurations, for different layers, under one name into a denoiser."""
    from peft import inject_adapter_in_model

    first, *others = configs
    if hasattr(denoiser, "add_adapter"):
        denoiser.add_adapter(first, NAME)  # type: ignore[operator]
    else:
        inject_adapter_in_model(first, denoiser, NAME)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # disjoint layers, as intended
        for config in others:
            inject_adapter_in_model(config, denoiser, NAME)


class Adapter(Trainable):
    """The adapters in a base model.

    Attributes:
        layers: What is done to each layer, by its name.
        network: The configuration it was made from.
    """

    def __init__(self, parts: Sequence[Part], layers: tuple[Layer, ...], network: NetworkConfig) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        planned = {layer.name: layer for layer in layers}
        self.modules = [name for _, names in by_part(parts, sorted(planned)) for name in names]
        self.layers = {name: planned[name] for name in self.modules}
        self.network = network
        inside = ((f"{part.prefix}{n}", m) for part in parts for n, m in part.module.named_modules())
        found: dict[str, Any] = {name: module for name, module in inside if isinstance(module, BaseTunerLayer)}
        assert sorted(found) == sorted(self.modules), "peft changed other layers than it was told to"
        self._layers = {name: found[name] for name in self.modules}
        self._keys: dict[str, list[str]] = {}
        parameters, rates = {}, {}
        for name, module in self._layers.items():
            self._keys[name] = []
            for inner, parameter in module.named_parameters():
                if inner.startswith("base_layer."):
                    continue
                key = f"{name}.{_factor_name(inner)}"
                parameters[key], rates[key] = parameter, self.layers[name].lr
                self._keys[name].append(key)
        frozen = {key for name, keys in self._keys.items() if self.layers[name].frozen for key in keys}
        super().__init__(parts, parameters, rates, frozen)
        self.train()

    @property
    def kinds(self) -> list[str]:
        """The adapter types in use, sorted."""
        return sorted({layer.kind for layer in self.layers.values()})

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Start values, drawn on the CPU in the order of the keys; magnitudes of dora are the weight's own norms."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for key, parameter in self._parameters.items():
            name = key.removesuffix(".weight").rpartition(".")[2]
            if name != MAGNITUDE:
                parameter.copy_(start_value(name, parameter.shape, generator))
        for name in self.modules:
            self.set_magnitude(name)

    # ------------------------------------------------------------------ behaviour
    def train(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 as torch.nn.Module.train
        """Switches its dropout; nothing else in the denoiser has a training mode, all of it stays in eval."""
        for name, layer in self._layers.items():
            layer.eval()
            layer.training = mode and self.layers[name].kind == "dora"  # peft asks it before it calls dora's dropout
            for dropout in getattr(layer, "lora_dropout", {}).values():
                dropout.train(mode)

    def set_enabled(self, enabled: bool) -> None:  # noqa: FBT001 a switch
        """False: the model answers as the base model; True: with the adapter again."""
        for layer in self._layers.values():
            layer.enable_adapters(enabled=enabled)
        for key in self._frozen:  # peft makes every adapter trainable that it switches on
            self._parameters[key].requires_grad = False

    # ------------------------------------------------------------------ one layer
    def weight(self, module: str) -> Tensor:
        """The base model's weight of one layer."""
        weight: Tensor = self._layers[module].get_base_layer().weight.detach()
        return weight

    def factors(self, module: str) -> Factors:
        """The factors of one layer: copies on the CPU, fp32."""
        start = len(module) + 1
        tensors = {key[start:]: self._parameters[key].detach().cpu().clone() for key in self._keys[module]}
        scale = float(self._layers[module].scaling[NAME])
        return Factors(self.layers[module].kind, tensors, scale, tuple(self.weight(module).shape))

    @torch.no_grad()
    def set_factors(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        """Replaces all factors of one layer."""
        assert {f"{module}.{name}" for name in tensors} == set(self._keys[module])
        for name, tensor in tensors.items():
            parameter = self._parameters[f"{module}.{name}"]
            parameter.copy_(tensor.reshape(parameter.shape))

    @torch.no_grad()
    def set_magnitude(self, module: str, extra: Tensor | None = None) -> None:
        """Sets the magnitudes of a dora layer to the norms of its weight, with `extra` added to it; else nothing."""
        magnitude = self._parameters.get(f"{module}.{MAGNITUDE}")
        if magnitude is not None:
            changed = self.weight(module).float().cpu() + (0 if extra is None else extra)
            magnitude.copy_(changed.flatten(1).norm(dim=1).reshape(magnitude.shape))

    def delta_weight(self, module: str) -> Tensor:
        """DeltaW of one layer, shaped like its weight, on the CPU; scaled by alpha / rank for every type."""
        return self.factors(module).delta(self.weight(module))

    # ------------------------------------------------------------------ files
    def checkpoint_header(self) -> dict[str, str]:
        """The adapter's configuration for diffusers, with the true alpha; empty where diffusers reads no such adapter."""
        several_files = len({part.ending for part in self.parts}) > 1
        if several_files or len(self.kinds) > 1 or not set(self.kinds) <= READ_BY_DIFFUSERS:
            return {"kinds": ",".join(self.kinds)}
        ranks = {name: (layer.rank, layer.alpha) for name, layer in self.layers.items()}
        return {"format": "pt", "lora_adapter_metadata": self.file_metadata(self.kinds[0], ranks)}

    def file_metadata(self, kind: str, ranks: Mapping[str, tuple[int, float]]) -> str:
        """What the header of an adapter file says about the adapter, as diffusers reads it.

        Args:
            kind: lora, dora, loha or lokr.
            ranks: Rank and alpha of each layer in the file.
        """
        found: dict[str, Any] = {}
        for part, names in by_part(self.parts, ranks):
            bare = {part.bare(name): ranks[name] for name in names}
            config = file_config(kind, bare, factor=self.network.lokr_factor, lead=part.lead)
            found |= {f"{part.file_prefix.removesuffix(part.lead)}{key}": value for key, value in config.items()}
        return json.dumps(found, sort_keys=True)


def _factor_name(parameter_name: str) -> str:
    """`lora_A.default.weight` to `lora_A.weight`; `lokr_w1.default` to `lokr_w1`; magnitudes as files name them."""
    name = f"{parameter_name}.".replace(f".{NAME}.", ".", 1).removesuffix(".")
    return name.removesuffix(".weight") if name.startswith(MAGNITUDE) else name
