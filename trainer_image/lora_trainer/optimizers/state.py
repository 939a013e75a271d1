"""The state of any optimizer as tensors and plain JSON, and back, to the bit.

Libraries keep more than tensors: counters for each parameter, numbers for each group (the rate that Prodigy found, the sum
of weights of an average), tables that all parameters share. What the configuration decides is not kept: it is the same
when the optimizer is built again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_FROM_OUTSIDE = (
    "params",
    "param_names",
    "lr",
    "lr_scale",
)  # of groups: set by who builds the optimizer, and by the loop


@dataclass
class OptimizerState:
    """An optimizer's state.

    Attributes:
        tensors: By the parameter's position and the name of the state, such as `00012.exp_avg`.
        numbers: The same for what is no tensor.
        same_as: Names of tensors that are one with another, such as a table that all parameters share.
        groups: For each parameter group, what training has changed in it.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    same_as: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """All but the tensors, as JSON takes it; empty where there is nothing."""
        facts = {"numbers": self.numbers, "same_as": self.same_as, "groups": self.groups if any(self.groups) else []}
        return {name: value for name, value in facts.items() if value}


def state_of(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """An optimizer's state; the tensors are the optimizer's own, no copies."""
    state = OptimizerState()
    seen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    whole = optimizer.state_dict()
    for position, values in sorted(whole["state"].items()):  # whatever the order in which they got their gradients
        for name, value in _leaves(values, f"{position:05d}"):
            if not isinstance(value, Tensor):
                state.numbers[name] = value
                continue
            held: Tensor = (
                value.to_local() if hasattr(value, "to_local") else value
            )  # what is shared out has no address
            place = (held.data_ptr(), value.shape, value.dtype)
            first = seen.setdefault(place, name) if held.numel() else name
            if first == name:
                state.tensors[name] = value.detach()
            else:
                state.same_as[name] = first
    state.groups = [_changed(group, optimizer.defaults) for group in whole["param_groups"]]
    return state


def load_state(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Puts a state into an optimizer that was built over the same parameters from the same configuration.

    Raises:
        ValueError: When it has other groups.
        KeyError: When a shared tensor is missing.
    """
    nested: dict[int, dict[str, Any]] = {}
    shared = {name: state.tensors[first] for name, first in state.same_as.items()}
    for name, value in {**state.tensors, **shared, **state.numbers}.items():
        position, *path, key = name.split(".")
        owner = nested.setdefault(int(position), {})
        for part in path:
            owner = owner.setdefault(part, {})
        owner[key] = value
    groups = optimizer.state_dict()["param_groups"]
    for group, changed in zip(groups, state.groups or [{}] * len(groups), strict=True):
        group.update(changed)
    optimizer.load_state_dict({"state": nested, "param_groups": groups})


def _leaves(values: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}", value


def _changed(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in group.items()
        if name not in _FROM_OUTSIDE and (name not in defaults or value != defaults[name])
    }
