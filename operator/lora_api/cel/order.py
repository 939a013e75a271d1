"""The CEL twins of `order`."""

from __future__ import annotations

from lora_api.cel.rule import Rule
from lora_api.optimization import LEAST_FACTOR
from lora_api.order import MAX_POINTS, MAX_STAGES, STEPS, StageConfig
from lora_api.schema import ITEMS

_LAST = "self.stages[self.stages.size() - 1]"
_PLANNED = "self.stages.map(s, has(s.steps) ? s.steps : 0).sum()"
_STEPS = f"(has(self.steps) ? self.steps : {STEPS})"

RULES: tuple[Rule, ...] = (
    Rule(
        on=("spec", "config", "train"),
        rule=f"self.stages.all(s, has(s.steps)) || (self.stages.exists_one(s, !has(s.steps)) && !has({_LAST}.steps))",
        message="steps of a stage is required for every stage but the last, which may go on until train.steps",
        field="stages",
        reason="FieldValueRequired",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule=f"self.stages.size() == 0 || !has({_LAST}.steps) || !has(self.steps) || self.steps == {_PLANNED}",
        message="have other steps in all than train.steps; make both the same, or leave steps out of the last stage, which "
        "then goes on until train.steps",
        field="stages",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule=f"self.stages.size() == 0 || has({_LAST}.steps) || {_PLANNED} < {_STEPS}",
        message="take all of train.steps before the last one; set train.steps above their sum",
        field="stages",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.stages.all(s, has(s.lr_scheduler) || !has(s.lr_scheduler_params))",
        message="lr_scheduler_params play no part without an lr_scheduler of the same stage; remove them, or set that too",
        field="stages",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.stages.all(s, !has(s.lr_scheduler) || s.lr_scheduler != 'cosine_with_restarts' || "
        "(has(s.lr_scheduler_params) ? s.lr_scheduler_params.num_cycles : self.lr_scheduler_params.num_cycles) > 1)",
        message="1 cycle never restarts; set num_cycles to 2 or more with lr_scheduler cosine_with_restarts, or choose cosine",
        field="stages",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule=f"self.optimizer != 'prodigy' || self.stages.all(s, !has(s.lr) || s.lr >= {LEAST_FACTOR})",
        message="the lr of a stage is a factor on the rate that prodigy finds with optimizer prodigy; set it to 1.0",
        field="stages",
    ),
    Rule(
        on=("spec", "config", "train"),
        rule="self.optimizer != 'schedule_free_adamw' || "
        "self.stages.all(s, !has(s.lr_scheduler) || s.lr_scheduler == 'constant')",
        message="the lr_scheduler of a stage must be constant: optimizer schedule_free_adamw averages in place of a schedule",
        field="stages",
    ),
    Rule(
        on=("spec", "config", "datasets", ITEMS),
        rule=f"[{', '.join(map(str, range(MAX_POINTS - 1)))}].all(i, i >= self.weight.size() - 1 || "
        "self.weight[i].at_step < self.weight[i + 1].at_step)",
        message="give the points in the order of their steps",
        field="weight",
    ),
    Rule(
        on=("spec", "config"),
        rule="self.datasets.all(d, d.weight.size() > 0) || self.datasets.all(d, d.weight.size() == 0)",
        message="weights count relative to each other, so give every dataset one, or none",
        field="datasets",
    ),
    Rule(
        on=("spec", "config"),
        rule="self.datasets.exists(d, d.weight.size() == 0 || d.weight.exists(p, p.value > 0.0))",
        message="the weight of every dataset is 0; let one of them be above 0",
        field="datasets",
    ),
    Rule(
        on=("spec", "config"),
        rule="self.datasets.exists(d, !d.is_reg)",
        message="is_reg is true in every dataset, so there is nothing to learn; set it to false in one",
        field="datasets",
    ),
)


def same_stages() -> str:
    """That stages differ in the length of the last one at most, which follows from `train.steps`."""
    before = ", ".join(str(number) for number in range(MAX_STAGES - 1))
    last = [
        _same(_LAST, _LAST.replace("self.", "oldSelf."), name) for name in StageConfig.model_fields if name != "steps"
    ]
    return (
        "self.stages.size() == oldSelf.stages.size() && "
        f"[{before}].all(i, i >= self.stages.size() - 1 || self.stages[i] == oldSelf.stages[i]) && "
        f"(self.stages.size() == 0 || ({' && '.join(last)}))"
    )


def _same(new: str, old: str, name: str) -> str:
    return f"has({new}.{name}) == has({old}.{name}) && (!has({new}.{name}) || {new}.{name} == {old}.{name})"
