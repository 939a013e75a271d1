"""Reads back which adapter a component holds, to check what a loader did."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lora_trainer.networks.factors import MAGNITUDE


@dataclass(frozen=True)
class Installed:
    """An adapter as it is found in a component.

    Attributes:
        modules: Dotted names of the layers that hold it.
        tensors: Its parameters under the keys of an adapter file, without the component's prefix.
        scales: alpha / rank of each layer.
    """

    modules: frozenset[str]
    tensors: dict[str, Tensor]
    scales: dict[str, float]


def installed_adapter(module: nn.Module, name: str) -> Installed:
    """The adapter called `name` in `module`; empty when there is none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tensors: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    for inner, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        for kind in layer.adapter_layer_names:
            held = getattr(layer, kind, {})
            if name not in held:
                continue
            scales[inner] = float(layer.scaling[name])
            if isinstance(held[name], nn.Module):
                found = {f"{inner}.{kind}.{key}": value for key, value in held[name].state_dict().items()}
                tensors.update({key.replace(f"{MAGNITUDE}.weight", MAGNITUDE): value for key, value in found.items()})
            else:
                tensors[f"{inner}.{kind}"] = held[name].detach()
    return Installed(frozenset(scales), tensors, scales)
