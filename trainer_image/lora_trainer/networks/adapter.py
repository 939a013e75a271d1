"""An adapter inside a denoiser: its parameters in a fixed order, its state, and the form it is exported in.

Adapter parameters are fp32 whatever the base model is: updates of 1e-4 would vanish in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.networks.spec import build_peft_config, resolve_targets

if TYPE_CHECKING:
    from lora_api.config import NetworkConfig
    from lora_trainer.families.base import BaseModel

NAME = "default"
"""peft's name of the adapter that is trained."""

ZERO_AT_START = (".lora_B.", ".lokr_w2.", ".lokr_w2_b.")
"""Factors that start at zero, so that DeltaW is zero and the first output is the base model's."""


def add_adapter(model: BaseModel, network: NetworkConfig, *, seed: int) -> Adapter:
    """Puts a fresh adapter into the denoiser of `model`, in place; the denoiser's output does not change yet.

    The start values depend on `seed` and the layers alone: not on the global generator, which is left as it was, and
    not on the base model's number format or device.

    Args:
        model: A loaded base model without an adapter.
        network: Type, rank, alpha and layers.
        seed: Of the start values.

    Raises:
        ValueError: The layer filters of `network` match nothing, or the model has an adapter already.
    """
    from peft import inject_adapter_in_model

    denoiser = model.denoiser
    if getattr(denoiser, "peft_config", None):
        raise ValueError("the denoiser has an adapter already")
    targets = resolve_targets(denoiser, model.default_targets(), network)
    config = build_peft_config(network, targets)
    with torch.random.fork_rng(devices=[]):
        if hasattr(denoiser, "add_adapter"):
            denoiser.add_adapter(config, NAME)  # type: ignore[operator]
        else:  # a container of several denoisers
            inject_adapter_in_model(config, denoiser, NAME)
    adapter = Adapter(denoiser, config)
    assert adapter.modules == sorted(targets.all), "peft changed other layers than it was told to"
    adapter.reset(seed)
    return adapter


class Adapter:
    """The trained part of a denoiser.

    Attributes:
        modules: Dotted names of the layers that it changes, sorted.
    """

    def __init__(self, denoiser: nn.Module, config: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._config = config
        self._layers: dict[str, Any] = {n: m for n, m in denoiser.named_modules() if isinstance(m, BaseTunerLayer)}
        self.modules = sorted(self._layers)
        named = ((n, p) for n, p in denoiser.named_parameters() if p.requires_grad)
        self._parameters = {_state_key(n): p for n, p in sorted(named)}
        for parameter in self._parameters.values():
            parameter.data = parameter.data.float()
        self.train()

    # ------------------------------------------------------------------ parameters and state
    @property
    def module_count(self) -> int:
        """Number of layers it changes."""
        return len(self._layers)

    def parameters(self) -> list[nn.Parameter]:
        """Its fp32 parameters, in the order of their sorted names: the order the optimizer's state refers to."""
        return list(self._parameters.values())

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
        """Switches its dropout; nothing else in the denoiser has a training mode, all of it stays in eval."""
        for layer in self._layers.values():
            layer.eval()
            for dropout in getattr(layer, "lora_dropout", {}).values():
                dropout.train(mode)

    def set_enabled(self, enabled: bool) -> None:  # noqa: FBT001 a switch
        """False: the denoiser answers as the base model; True: with the adapter again."""
        for layer in self._layers.values():
            layer.enable_adapters(enabled=enabled)

    def delta_weight(self, module: str) -> Tensor:
        """DeltaW of one layer, shaped like its weight: (alpha / rank) B A, or (alpha / rank) times the Kronecker product."""
        delta: Tensor = self._layers[module].get_delta_weight(NAME)
        return delta.detach()

    # ------------------------------------------------------------------ export
    def portable_state_dict(self, part: str = "") -> dict[str, Tensor]:
        """`state_dict` with alpha / rank folded into one factor: means the same in programs that read no alpha.

        Args:
            part: Only layers below this child of the denoiser, named from there.
        """
        state = self.state_dict()
        for module, layer in self._layers.items():
            scale = float(layer.scaling[NAME])
            for factor in (f"{module}.lora_B.weight", f"{module}.lokr_w1"):
                if factor in state:
                    state[factor] *= scale
        return {key.removeprefix(part): tensor for key, tensor in state.items() if key.startswith(part)}

    def portable_config(self, part: str = "") -> dict[str, Any]:
        """The peft configuration of `portable_state_dict`: alpha equals the rank. Only what a reader needs, as plain data.

        Fields that a reader of another version might not know are left out: loaders hand all of them to a constructor.
        """
        config = self._config
        ranks = {k.replace(f"^{part}", "^", 1): v for k, v in config.rank_pattern.items() if k.startswith(f"^{part}")}
        shared: dict[str, Any] = {
            "r": config.r,
            "target_modules": [name.removeprefix(part) for name in self.modules if name.startswith(part)],
            "rank_pattern": ranks,
            "alpha_pattern": dict(ranks),
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
