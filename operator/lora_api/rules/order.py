"""What the order of training asks for; see `rules`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from lora_api.optimization import LEAST_FACTOR
from lora_api.order import weight_at

if TYPE_CHECKING:
    from lora_api.config import TrainerConfig


def all_stages_but_the_last_have_steps(config: TrainerConfig) -> str | None:
    """Where a stage ends has to be known."""
    for number, stage in enumerate(config.train.stages[:-1]):
        if stage.steps is None:
            return f"train.stages[{number}].steps: required for every stage but the last, which may go on until train.steps"
    return None


def stages_are_as_long_as_the_run(config: TrainerConfig) -> str | None:
    """Steps of the stages and of the run are said twice, so they have to agree."""
    stages, steps = config.train.stages, config.train.steps
    if not stages:
        return None
    planned = sum(stage.steps or 0 for stage in stages)
    if stages[-1].steps is not None and planned != steps:
        return (
            f"train.stages: have {planned} steps in all, but train.steps is {steps}; make both the same, or leave steps out of "
            "the last stage, which then goes on until train.steps"
        )
    if stages[-1].steps is None and planned >= steps:
        return (
            f"train.stages: take {planned} steps before the last one, which leaves none of train.steps: {steps} for it; set "
            f"train.steps above {planned}"
        )
    return None


def schedules_of_stages_have_a_meaning(config: TrainerConfig) -> str | None:
    """A shape without a schedule would be ignored; restarts without a number never happen."""
    for number, stage in enumerate(config.train.stages):
        path, shape = f"train.stages[{number}]", stage.lr_scheduler_params
        if shape is not None and stage.lr_scheduler is None:
            return f"{path}.lr_scheduler_params: plays no part without an lr_scheduler of this stage; remove it, or set that too"
        cycles = (shape or config.train.lr_scheduler_params).num_cycles
        if stage.lr_scheduler == "cosine_with_restarts" and cycles == 1:
            return (
                f"{path}.lr_scheduler_params: 1 cycle never restarts; set num_cycles to 2 or more with lr_scheduler "
                "cosine_with_restarts, or choose cosine"
            )
    return None


def weights_are_given_in_order(config: TrainerConfig) -> str | None:
    """Points of a weight follow each other."""
    for number, dataset in enumerate(config.datasets):
        steps = [point.at_step for point in dataset.weight]
        for one, other in pairwise(steps):
            if one >= other:
                return f"datasets[{number}].weight: at_step {other} follows {one}; give the points in the order of their steps"
    return None


def all_datasets_have_weights_or_none(config: TrainerConfig) -> str | None:
    """A weight says nothing beside a dataset without one."""
    weighed = [bool(dataset.weight) for dataset in config.datasets]
    if any(weighed) and not all(weighed):
        return (
            f"datasets[{weighed.index(False)}].weight: is missing, and datasets[{weighed.index(True)}] has one; weights count "
            "relative to each other, so give every dataset one, or none"
        )
    return None


def something_weighs_at_every_step(config: TrainerConfig) -> str | None:
    """Weights are straight between their points, so they are all 0 somewhere only if they are so at a point."""
    if not config.datasets[0].weight:
        return None
    steps = sorted({0, *(point.at_step for dataset in config.datasets for point in dataset.weight)})
    for step in steps:
        if not any(weight_at(dataset.weight, step) for dataset in config.datasets):
            return f"datasets[0].weight: 0 at step {step}, and so is that of every dataset; let one of them be above 0"
    return None


def something_is_no_regularisation_set(config: TrainerConfig) -> str | None:
    """Prior preservation needs something new beside the prior."""
    if all(dataset.is_reg for dataset in config.datasets):
        return "datasets[0].is_reg: true in every dataset, so there is nothing to learn; set it to false in one"
    return None


def stages_fit_the_optimizer(config: TrainerConfig) -> str | None:
    """What `optimization` asks of the run's rate and schedule holds for those of its stages."""
    optimizer = config.train.optimizer
    for number, stage in enumerate(config.train.stages):
        path = f"train.stages[{number}]"
        if optimizer == "prodigy" and stage.lr is not None and stage.lr < LEAST_FACTOR:
            return f"{path}.lr: {stage.lr:g}, but with optimizer prodigy it is a factor on the rate that prodigy finds; set it to 1.0"
        if optimizer == "schedule_free_adamw" and stage.lr_scheduler not in (None, "constant"):
            return (
                f"{path}.lr_scheduler: {stage.lr_scheduler}, but optimizer schedule_free_adamw averages in place of a schedule; "
                "set constant, with a warm-up"
            )
    return None


RULES: tuple[Callable[[TrainerConfig], str | None], ...] = (
    all_stages_but_the_last_have_steps,
    stages_are_as_long_as_the_run,
    schedules_of_stages_have_a_meaning,
    stages_fit_the_optimizer,
    weights_are_given_in_order,
    all_datasets_have_weights_or_none,
    something_weighs_at_every_step,
    something_is_no_regularisation_set,
)
"""In the order in which they are asked."""
