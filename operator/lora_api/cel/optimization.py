"""The twins of `rules.optimization`; see `cel`."""

from __future__ import annotations

from lora_api.cel.rule import Rule, listed
from lora_api.optimization import ADAM_LIKE, LEAST_FACTOR, PARAMS_OF
from lora_api.training import TrainConfig

_TRAIN = ("spec", "config", "train")
_NO_PART = "plays no part with this lr_scheduler; remove it"
_FACTOR = "is a factor on the rate that prodigy finds with optimizer prodigy; set it to 1.0"


def _default(name: str) -> str:
    return str(float(TrainConfig.model_fields[name].default))


RULES: tuple[Rule, ...] = (
    Rule(
        on=_TRAIN,
        rule="self.warmup_steps == 0 || self.warmup_ratio == 0.0",
        message="is set beside warmup_steps; set one of them",
        field="warmup_ratio",
    ),
    Rule(
        on=_TRAIN,
        rule="self.lr_scheduler != 'cosine_with_restarts' || self.lr_scheduler_params.num_cycles > 1",
        message="1 cycle never restarts; set 2 or more with lr_scheduler cosine_with_restarts, or choose cosine",
        field="lr_scheduler_params.num_cycles",
    ),
    *(
        Rule(
            on=_TRAIN,
            rule=f"self.lr_scheduler_params.{name} == {default} || self.lr_scheduler {needed}",
            message=_NO_PART,
            field=f"lr_scheduler_params.{name}",
        )
        for name, default, needed in (
            ("num_cycles", "1", "== 'cosine_with_restarts'"),
            ("power", "1.0", "== 'polynomial'"),
            ("min_lr_ratio", "0.0", "!= 'constant'"),
        )
    ),
    *(
        Rule(
            on=_TRAIN,
            rule=f"self.{name} == {_default(name)} || self.optimizer in {listed(ADAM_LIKE)}",
            message="plays no part with this optimizer; remove it",
            field=name,
        )
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon")
    ),
    *(
        Rule(
            on=_TRAIN,
            rule=f"!has(self.optimizer_params.{name}) || self.optimizer == '{owner}'",
            message=f"is for optimizer {owner}; remove it",
            field=f"optimizer_params.{name}",
        )
        for owner, names in PARAMS_OF.items()
        for name in names
    ),
    Rule(
        on=_TRAIN,
        rule=f"self.optimizer != 'prodigy' || self.lr >= {LEAST_FACTOR}",
        message=_FACTOR,
        field="lr",
    ),
    *(
        Rule(
            on=_TRAIN,
            rule=f"self.optimizer != 'prodigy' || !has(self.{name}) || self.{name} >= {LEAST_FACTOR}",
            message=_FACTOR,
            field=name,
        )
        for name in ("unet_lr", "text_encoder_lr")
    ),
    Rule(
        on=("spec", "config"),
        rule=f"self.train.optimizer != 'prodigy' || self.network.modules.all(m, !has(m.lr) || m.lr >= {LEAST_FACTOR})",
        message=f"the lr of a rule {_FACTOR}",
        field="network.modules",
    ),
    Rule(
        on=_TRAIN,
        rule="self.optimizer != 'schedule_free_adamw' || self.lr_scheduler == 'constant'",
        message="must be constant, with a warm-up: optimizer schedule_free_adamw averages in place of a schedule",
        field="lr_scheduler",
    ),
    Rule(
        on=_TRAIN,
        rule="self.optimizer != 'schedule_free_adamw' || self.adam_beta1 > 0.0",
        message="must be above 0: optimizer schedule_free_adamw interpolates by it",
        field="adam_beta1",
    ),
    Rule(
        on=_TRAIN,
        rule="!self.ema_config.use_ema || self.optimizer != 'schedule_free_adamw'",
        message="must be false: optimizer schedule_free_adamw averages by itself",
        field="ema_config.use_ema",
    ),
)
