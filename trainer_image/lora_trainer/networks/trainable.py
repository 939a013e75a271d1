"""What is trained, whatever it is: fp32 parameters in a fixed order, their state, and their learning rates.

Parameters are fp32 whatever the base model is: updates of 1e-4 would vanish in bf16.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lora_trainer.families.parts import Part, by_part, part_of
from lora_trainer.spread import Spread


class Trainable(ABC):
    """The trained part of a base model.

    Attributes:
        parts: The components that it changes.
        modules: Names of the layers that it changes, sorted within each component.
        spread: How its parameters lie on the ranks.
    """

    modules: list[str]
    spread: Spread = Spread()

    def __init__(
        self,
        parts: Sequence[Part],
        parameters: Mapping[str, nn.Parameter],
        rates: Mapping[str, float | None],
        frozen: Collection[str] = (),
    ) -> None:
        self.parts = parts
        self._parameters = {key: parameters[key] for _, keys in by_part(parts, sorted(parameters)) for key in keys}
        self._rates = {key: rates[key] for key in self._parameters}
        self._frozen = frozenset(frozen)
        for key, parameter in self._parameters.items():
            parameter.data = parameter.data.float()
            parameter.requires_grad = key not in frozen

    @property
    def module_count(self) -> int:
        """Number of layers it changes."""
        return len(self.modules)

    def parameters(self) -> list[nn.Parameter]:
        """Its fp32 parameters, sorted by name within each component."""
        return list(self._parameters.values())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The same with the keys of `state_dict`."""
        return list(self._parameters.items())

    def optimizer_groups(
        self, lr: float, *, denoiser_lr: float | None = None, text_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer, one for each learning rate, the job's own first.

        The order is fixed, also within a group, and does not depend on `lr`: the optimizer's state refers to positions.

        Args:
            lr: `train.lr` of the configuration. `lr_scale` of a group is its rate divided by this one, so that a rate
                changed while training scales all groups.
            denoiser_lr: Of the denoiser's layers that have no rate of their own. None: `lr`.
            text_lr: The same of the text encoders.
        """
        groups: dict[float | None, list[nn.Parameter]] = {}
        for key, parameter in self._parameters.items():
            if key in self._frozen:
                continue  # part of the result, but kept as a warm start made it
            own = self._rates[key]
            shared = text_lr if part_of(self.parts, key).encodes_text else denoiser_lr
            groups.setdefault(shared if own is None else own, []).append(parameter)
        ordered = sorted(groups.items(), key=lambda item: item[0] is not None)
        return [{"params": group, "lr_scale": 1.0 if rate is None else rate / lr} for rate, group in ordered]

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the parameters on the CPU, fp32, by their names in the denoiser: `<layer>.lora_A.weight`."""
        return {key: self.spread.whole(parameter) for key, parameter in self._parameters.items()}

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
            self.spread.fill(parameter, state[key])

    def collect(self, *, keep: bool) -> None:  # noqa: B027 adapters have nothing to gather
        """Gathers what the export of whole models needs, where it is sharded; every rank takes part. Nothing for adapters.

        Args:
            keep: See `Spread.whole`.
        """

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The parameters themselves, no copies, by the keys of checkpoints: with the component in front."""
        return {self._checkpoint_key(key): parameter.detach() for key, parameter in self._parameters.items()}

    def standing_at(self, tensors: Mapping[str, Tensor]) -> Self:
        """This, with other values: what files are made from while training goes on.

        Args:
            tensors: By the keys of `checkpoint_tensors`; the one returned reads them where they lie.
        """
        twin = copy.copy(self)
        values = {key: cast("nn.Parameter", tensors[self._checkpoint_key(key)]) for key in self._parameters}
        twin._parameters = values  # noqa: SLF001 - our own
        return twin

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the values of `checkpoint_tensors`, to the bit.

        Raises:
            ValueError: See `load_state_dict`.
        """
        own = {self._checkpoint_key(key): key for key in self._parameters}
        self.load_state_dict({own.get(key, key): tensor for key, tensor in tensors.items()})

    def _checkpoint_key(self, key: str) -> str:
        return part_of(self.parts, key).full(key)

    @abstractmethod
    def train(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 as torch.nn.Module.train
        """Switches its dropout; nothing else in the denoiser has a training mode, all of it stays in eval."""

    @abstractmethod
    def checkpoint_header(self) -> dict[str, str]:
        """What a checkpoint's file says about itself, so that other programs can read it."""
