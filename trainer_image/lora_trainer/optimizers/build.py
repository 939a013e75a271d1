"""`train.optimizer`: the class behind each name. Libraries are imported only for the optimizer that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_api.training import TrainConfig
from lora_trainer.errors import ConfigurationError

Parameters = list[torch.nn.Parameter] | list[dict[str, Any]]

_KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"


def build_optimizer(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer over what is trained.

    Args:
        parameters: fp32; plain, or in groups as `Trainable.optimizer_groups` makes them. `lr_scale` of a group is its
            learning rate as a multiple of `train.lr`, to which the loop holds when that changes.
        config: Names the optimizer; rates, moments and decay.

    Raises:
        ConfigurationError: When the optimizer can't work here.
    """
    optimizer = _BUILDERS[config.optimizer](parameters, config)
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", 1.0)
    return optimizer


def _shared(config: TrainConfig) -> dict[str, Any]:
    return {"lr": config.lr, "weight_decay": config.weight_decay}


def _moments(config: TrainConfig) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def _given(config: TrainConfig, *names: str) -> dict[str, Any]:
    """Fields of `optimizer_params` that are set."""
    values = {name: getattr(config.optimizer_params, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _adamw(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    # fused: one kernel over all parameters, on CPUs too
    return torch.optim.AdamW(parameters, fused=True, **_shared(config), **_moments(config))


def _adamw8bit(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"config.train.optimizer: adamw8bit needs bitsandbytes, which can't be loaded here ({error}); set adamw"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **_shared(config), **_moments(config))
    device = optimizer.param_groups[0]["params"][0].device
    if not has_kernel(device):
        raise ConfigurationError(
            f"config.train.optimizer: adamw8bit has no kernel for {device.type} in this build of bitsandbytes; set adamw"
        )
    return optimizer


def has_kernel(device: torch.device) -> bool:
    """Whether bitsandbytes, which has to be imported, updates 8-bit moments on a device."""
    key = torch._C._dispatch_key_for_device(device.type)  # noqa: SLF001 - no public way to ask for a kernel
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_KERNEL, key))  # noqa: SLF001 - the same


def _adafactor(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    """transformers': that of torch multiplies every rate by its matrix' size, which is 0 for half of a fresh LoRA."""
    from transformers.optimization import Adafactor

    given = _given(config, "scale_parameter", "clip_threshold", "decay_rate")
    options = {"scale_parameter": False, "relative_step": False, "warmup_init": False} | given
    optimizer: torch.optim.Optimizer = Adafactor(parameters, **_shared(config), **options)
    return optimizer


def _prodigy(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    from lora_trainer.optimizers.prodigy import Prodigy

    given = _given(config, "d_coef", "d0", "use_bias_correction", "safeguard_warmup")
    return Prodigy(parameters, **_shared(config), **_moments(config), **given)


def _lion(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    from pytorch_optimizer.optimizer.lion import Lion

    own = {"beta1": 0.9, "beta2": 0.99} | _given(config, "beta1", "beta2")
    optimizer: torch.optim.Optimizer = Lion(parameters, betas=(own["beta1"], own["beta2"]), **_shared(config))
    return optimizer


def _schedule_free_adamw(parameters: Parameters, config: TrainConfig) -> torch.optim.Optimizer:
    """The loop sets each step's rate, warm-up included; the optimizer's own warm-up stays off."""
    from pytorch_optimizer.optimizer.schedulefree import ScheduleFreeAdamW

    given = _given(config, "r", "weight_lr_power")
    optimizer: torch.optim.Optimizer = ScheduleFreeAdamW(parameters, **_shared(config), **_moments(config), **given)
    return optimizer


_BUILDERS: dict[str, Callable[[Parameters, TrainConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
    "prodigy": _prodigy,
    "lion": _lion,
    "schedule_free_adamw": _schedule_free_adamw,
}
