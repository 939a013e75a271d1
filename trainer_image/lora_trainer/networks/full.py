"""Full fine-tuning: the weights of the denoiser themselves are trained."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.families.parts import Part
from lora_trainer.networks.spec import filter_names, rule_for_each
from lora_trainer.networks.trainable import Trainable
from lora_trainer.spread import Spread

if TYPE_CHECKING:
    from lora_api.network import NetworkConfig
    from lora_trainer.families.base import BaseModel

logger = logging.getLogger(__name__)


def train_all(model: BaseModel, network: NetworkConfig, spread: Spread | None = None) -> FullFineTune:
    """Makes the denoiser of `model` trainable, in fp32, in place; its output does not change but for the number format.

    Captions are encoded before this: `model.dtype` is fp32 afterwards, so that samples are drawn in the weights' format.

    Args:
        model: A loaded base model without an adapter.
        network: Its layer filters and the frozen parts of its rules keep layers out, its rules set learning rates.
        spread: How the denoiser lies on the ranks. Where it is sharded already, each share is made fp32 by itself.

    Raises:
        ValueError: A filter or a pattern matches nothing, or no layer is left.
    """
    part, *others = model.parts()
    assert not others, "the types refuse this for two experts"
    denoiser = part.module
    if getattr(denoiser, "peft_config", None):
        raise ValueError("the denoiser has an adapter already")
    for field in ("conv", "conv_alpha"):
        if getattr(network, field) is not None:
            logger.info("network.%s plays no part with network.type: full", field)
    names = sorted({_layer(name) for name, _ in denoiser.named_parameters()})
    rules = rule_for_each(filter_names(names, network, [part]), network.modules, [part])
    denoiser.float()
    model.dtype = torch.float32
    chosen = {name: p for name, p in denoiser.named_parameters() if _layer(name) in rules}
    rates = {name: rule.lr if (rule := rules[_layer(name)]) else None for name in chosen}
    return FullFineTune(part, chosen, rates, sorted(rules), spread or Spread())


class FullFineTune(Trainable):
    """The weights of a denoiser."""

    def __init__(
        self,
        part: Part,
        parameters: dict[str, nn.Parameter],
        rates: dict[str, float | None],
        modules: list[str],
        spread: Spread,
    ) -> None:
        super().__init__([part], parameters, rates)
        self._denoiser = part.module
        self.modules = modules
        self.spread = spread
        self._collected: dict[str, Tensor] | None = None

    def train(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 as torch.nn.Module.train
        """Nothing: the denoiser has no dropout that we use, it stays in eval."""

    def whole_state_dict(self) -> dict[str, Tensor]:
        """All weights of the denoiser, frozen ones too, as the component of a pipeline holds them."""
        if self._collected is not None:
            return self._collected
        return {key: tensor.detach() for key, tensor in self._denoiser.state_dict().items()}

    def collect(self, *, keep: bool) -> None:
        """See `Trainable.collect`: what `whole_state_dict` returns from now on."""
        if self.spread.sharded:
            state = self._denoiser.state_dict()
            self._collected = {key: self.spread.whole(tensor, keep=keep) for key, tensor in state.items()}

    @torch.no_grad()
    def add(self, layer: str, delta: Tensor) -> None:
        """Adds to the weight of one layer."""
        weight = self._parameters[f"{layer}.weight"]
        (held,) = self.spread.held([weight])
        held.add_(self.spread.part(weight, delta).to(held.device))

    def weight(self, layer: str) -> Tensor:
        """The weight of one layer; all of it, on every rank."""
        weight = self._parameters[f"{layer}.weight"].detach()
        return self.spread.whole(weight) if self.spread.sharded else weight

    def checkpoint_header(self) -> dict[str, str]:
        """The keys are those of the denoiser; no configuration is needed to read them."""
        return {"format": "pt", "kinds": "full"}


def _layer(parameter: str) -> str:
    """The layer that owns a parameter; a parameter outside of layers stands for itself."""
    head, _, last = parameter.rpartition(".")
    return head if last in ("weight", "bias") else parameter
