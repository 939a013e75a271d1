"""The CEL twins of `rules_optimization`; see `cel`."""

from __future__ import annotations

from lora_api.cel_rule import Rule

_TRAIN = ("spec", "config", "train")
_NO_PART = "plays no part with this lr_scheduler; remove it"

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
)
