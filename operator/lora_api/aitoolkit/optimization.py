"""Optimizers and learning-rate schedules: their names and parameters in ours."""

from __future__ import annotations

from typing import Any

from lora_api.aitoolkit import tables
from lora_api.aitoolkit.findings import Block
from lora_api.optimization import ADAM_LIKE, EmaConfig, OptimizerParams, SchedulerParams
from lora_api.training import TrainConfig
from lora_api.wording import short

OPTIMIZERS = {
    "adam": ("adamw", "Adam with decoupled weight decay"),
    "adam8": ("adamw8bit", "Adam with decoupled weight decay and 8-bit moments"),
    "adam8bit": ("adamw8bit", "Adam with decoupled weight decay and 8-bit moments"),
    "adamw8": ("adamw8bit", ""),
    "lion8bit": ("lion", "the same update with its moment in 32 bits, which needs more memory"),
    "prodigy8bit": ("prodigy", "the same update with moments in 32 bits, which needs more memory"),
    "prodigyopt": ("prodigy", ""),
    "adamwschedulefree": ("schedule_free_adamw", ""),
    "adamw_schedulefree": ("schedule_free_adamw", ""),
    "schedulefree": ("schedule_free_adamw", ""),
}
"""Their other names, and those of optimizers that differ only in memory; the rest is refused by the types."""

_PRODIGY_RATE = 0.1  # below it, a rate for Prodigy is taken as 1 there


def read_optimizer(block: Block) -> None:
    """The optimizer with its parameters. What is left out gets the value it has there."""
    name = str(block.take("optimizer") or "adamw").lower()
    if name in OPTIMIZERS:
        ours, why = OPTIMIZERS[name]
        if why:
            block.note(f"train.optimizer: {name} is {ours} here: {why}")
        name = ours
    block.out["optimizer"] = name
    given = block.inner("optimizer_params")
    _betas(given, name)
    if name == "adafactor":
        given.take("eps")  # inside of its second moment; as good as 0 there and here
    given.rename("eps", "adam_epsilon")
    given.rename("bias_correction", "use_bias_correction")
    read = given.finish(tables.OPTIMIZER_PARAMS.get(name, {}), _Both)
    own = {key: read.pop(key) for key in OptimizerParams.model_fields if key in read}
    if own:
        block.out["optimizer_params"] = own
    block.out |= read
    if name in ("adamw", "adamw8bit"):
        block.default("weight_decay", 0.01)
    if name in ADAM_LIKE and name != "schedule_free_adamw":
        block.default("adam_epsilon", 1e-6)
    if name == "prodigy":
        _rate_of_prodigy(block)


def read_average(block: Block) -> None:
    """The average of the weights; its decay is the same from the first step on there."""
    given = block.inner("ema_config")
    is_on = given.peek("use_ema")
    read = given.finish(tables.EMA, EmaConfig)
    if is_on:
        block.out["ema_config"] = {"ema_warmup": False, **read}
        block.note(
            "train.ema_config: checkpoints hold the average and what training goes on with; there, both are lost when a run "
            "is resumed"
        )


class _Both(TrainConfig, OptimizerParams):
    """What may stand in `optimizer_params` under our own names: ours, and what is beside it here."""


def _betas(given: Block, name: str) -> None:
    betas = given.take("betas")
    if betas is None or name == "adafactor":
        return
    if not isinstance(betas, list) or len(betas) != 2:
        given.problem("betas", f"found {short(betas)}, expected a list of two numbers")
        return
    first, second = ("beta1", "beta2") if name == "lion" else ("adam_beta1", "adam_beta2")
    given.out[first], given.out[second] = betas


def _rate_of_prodigy(block: Block) -> None:
    rate: Any = block.peek("lr")
    if isinstance(rate, int | float) and rate < _PRODIGY_RATE:
        block.take("lr")
        block.out["lr"] = 1.0
        block.note(
            f"train.lr: {short(rate)} is 1.0 here: it is a factor on the rate that Prodigy finds, and taken as 1 there"
        )


def read_schedule(block: Block) -> None:
    """The shape of the learning rate."""
    name = block.take("lr_scheduler") or "constant"
    given = block.inner("lr_scheduler_params")
    warmup = given.take("num_warmup_steps")
    if name == "constant_with_warmup":
        name = "constant"
        if warmup is None:
            warmup = 1000
            block.findings.defaults.append("train.warmup_steps 1000")
    if name == "linear":
        block.problem(
            "lr_scheduler", "linear rises from a third of lr to lr there, which is not supported; use constant"
        )
    if name == "cosine_with_restarts" and not given.has("num_cycles"):
        name = "cosine"  # its first period has all steps there, so it never restarts
    _schedule_ends(block, given)
    block.out["lr_scheduler"] = name
    if warmup is not None:
        block.out["warmup_steps"] = warmup
    shape = given.finish({}, SchedulerParams)
    if shape:
        block.out["lr_scheduler_params"] = shape


def _schedule_ends(block: Block, given: Block) -> None:
    """A last rate, which is absolute there, as a share of `lr`."""
    end, rate = given.take("eta_min"), block.peek("lr")
    if isinstance(end, int | float) and isinstance(rate, int | float) and rate > 0:
        given.out["min_lr_ratio"] = end / rate
    elif end is not None:
        given.problem("eta_min", f"found {short(end)}, expected a number")
