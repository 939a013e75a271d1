"""From stages to batches: each stage has an order of its own over the samples that were made for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_api.order import weight_at
from lora_api.training import TrainConfig
from lora_trainer.data.sampler import BatchOrder, mix
from lora_trainer.data.stream import Batches, BatchMaker, SampleReader, Share, batches_ahead
from lora_trainer.data.weights import Order, Turns, WeightedOrder
from lora_trainer.objective import Objective
from lora_trainer.runtime import Group
from lora_trainer.stages import Stage

if TYPE_CHECKING:
    from lora_trainer.prepare import Prepared
    from lora_trainer.state import TrainState

_STAGE, _DATASET = 7, 8  # see `objective`, which uses 3 to 6


class Course:
    """Makes the batches of any stage.

    Args:
        prepared: Samples with their views, base model and cache.
        train: What defines the run.
        group: All ranks.
    """

    def __init__(self, prepared: Prepared, train: TrainConfig, group: Group) -> None:
        self._samples, self._views, self._model = prepared.samples, prepared.views, prepared.model
        self._train, self._group = train, group
        self._reader = SampleReader(prepared.samples, prepared.model, prepared.cache)

    def batches(self, stage: Stage, state: TrainState) -> Batches:
        """The micro-batches from the state's iteration on.

        Args:
            stage: The present one.
            state: Says where it began and where it is.
        """
        share = Share(
            stage.batch_size, stage.accumulation, self._group.rank, self._group.world_size, pieces=stage.pieces
        )
        seed = self._train.seed if stage.number == 0 else mix(self._train.seed, _STAGE, stage.number)
        maker = BatchMaker(
            self._reader, self._order(stage, share, seed), self._model, share, Objective.of(self._train, self._model),
            first_iteration=state.stage_iteration, sample_weights=self._sample_weights(),
        )  # fmt: skip
        return Batches(maker.make, state.iteration, share.passes, batches_ahead(self._model.device))

    def _order(self, stage: Stage, share: Share, seed: int) -> Order:
        place = self._views[stage.datasets]
        if not stage.datasets[0].weight:
            return BatchOrder([self._samples[n].group for n in place], share.global_batch, seed, first=place.start)
        orders = []
        for dataset in range(len(stage.datasets)):  # the samples of each stand together
            numbers = [n for n in place if self._samples[n].dataset == dataset]
            groups, own_seed = [self._samples[n].group for n in numbers], mix(seed, _DATASET, dataset)
            orders.append(BatchOrder(groups, share.global_batch, own_seed, first=numbers[0]))

        def weights(position: int) -> list[float]:
            step = stage.begin + position // share.accumulation
            return [weight_at(each.weight, step) for each in stage.datasets]

        return WeightedOrder(orders, Turns(weights))

    def _sample_weights(self) -> list[float] | None:
        """Weights of the loss of each sample; None where all are 1."""
        weight = self._train.reg_weight
        if weight == 1.0 or not any(sample.is_reg for sample in self._samples):
            return None
        return [weight if sample.is_reg else 1.0 for sample in self._samples]


def enter(stage: Stage, state: TrainState) -> None:
    """Makes the stage the present one in the counters, if another one was."""
    if state.stage != stage.number:
        state.stage, state.stage_iteration = stage.number, state.iteration
