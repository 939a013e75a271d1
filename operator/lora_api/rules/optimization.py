"""What optimizer, schedule and averages ask of each other; see `rules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_api.optimization import ADAM_LIKE, LEAST_FACTOR, PARAMS_OF, OptimizerParams
from lora_api.training import TrainConfig

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig


def the_warm_up_is_given_once(config: TrainerConfig) -> str | None:
    """Two lengths of one warm-up contradict each other."""
    train = config.train
    if train.warmup_steps and train.warmup_ratio:
        return f"train.warmup_ratio: {train.warmup_ratio:g}, and warmup_steps is {train.warmup_steps}; set one of them"
    return None


def the_schedule_has_the_shape_it_is_given(config: TrainerConfig) -> str | None:
    """Parameters of another schedule would be ignored; restarts without a number never happen."""
    kind, params = config.train.lr_scheduler, config.train.lr_scheduler_params
    if kind == "cosine_with_restarts" and params.num_cycles == 1:
        return (
            "train.lr_scheduler_params.num_cycles: 1 cycle never restarts; set 2 or more with lr_scheduler "
            "cosine_with_restarts, or choose cosine"
        )
    wrong = {
        "num_cycles": params.num_cycles != 1 and kind != "cosine_with_restarts",
        "power": params.power != 1 and kind != "polynomial",
        "min_lr_ratio": params.min_lr_ratio != 0 and kind == "constant",
    }
    for field, is_so in wrong.items():
        if is_so:
            return (
                f"train.lr_scheduler_params.{field}: {getattr(params, field):g} plays no part with lr_scheduler {kind}; "
                "remove it"
            )
    return None


def optimizers_get_what_they_have(config: TrainerConfig) -> str | None:
    """Moments and parameters of another optimizer would be ignored."""
    train = config.train
    if train.optimizer not in ADAM_LIKE:
        for field in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if getattr(train, field) != TrainConfig.model_fields[field].default:
                return f"train.{field}: {getattr(train, field):g} plays no part with optimizer {train.optimizer}; remove it"
    for field in OptimizerParams.model_fields:
        value = getattr(train.optimizer_params, field)
        if value is not None and field not in PARAMS_OF.get(train.optimizer, ()):
            owner = next(name for name, fields in PARAMS_OF.items() if field in fields)
            return f"train.optimizer_params.{field}: is for optimizer {owner}, and optimizer is {train.optimizer}; remove it"
    return None


def rates_of_prodigy_are_factors(config: TrainerConfig) -> str | None:
    """Prodigy finds the rate itself; an ordinary one on top would keep it from learning anything."""
    if config.train.optimizer != "prodigy":
        return None
    named = [(f"train.{name}", getattr(config.train, name)) for name in ("lr", "unet_lr", "text_encoder_lr")]
    named += [(f"network.modules[{n}].lr", each.lr) for n, each in enumerate(config.network.modules)]
    for path, rate in named:
        if rate is not None and rate < LEAST_FACTOR:
            return f"{path}: {rate:g}, but with optimizer prodigy it is a factor on the rate that prodigy finds; set it to 1.0"
    return None


def schedule_free_has_no_schedule(config: TrainerConfig) -> str | None:
    """It averages over the run in place of a schedule, and interpolates by beta 1."""
    train = config.train
    if train.optimizer != "schedule_free_adamw":
        return None
    if train.lr_scheduler != "constant":
        return (
            f"train.lr_scheduler: {train.lr_scheduler}, but optimizer schedule_free_adamw averages in place of a schedule; "
            "set constant, with a warm-up"
        )
    if train.adam_beta1 == 0:
        return "train.adam_beta1: 0, but optimizer schedule_free_adamw interpolates by it; expected a value above 0"
    return None


def one_average_is_enough(config: TrainerConfig) -> str | None:
    """An average of an average lags behind."""
    if config.train.ema_config.use_ema and config.train.optimizer == "schedule_free_adamw":
        return "train.ema_config.use_ema: true, but optimizer schedule_free_adamw averages by itself; set it to false"
    return None


RULES: tuple[Callable[[TrainerConfig], str | None], ...] = (
    the_warm_up_is_given_once,
    the_schedule_has_the_shape_it_is_given,
    optimizers_get_what_they_have,
    rates_of_prodigy_are_factors,
    schedule_free_has_no_schedule,
    one_average_is_enough,
)
"""In the order in which they are asked."""
