"""The training loop. Everything that is not a forward pass, a backward pass or an update lives elsewhere.

Per iteration: accumulate gradients over micro-batches, agree with all ranks on loss, norm and wishes, update or skip.
An update that would not be finite is skipped on every rank and its batch is not tried again, so `step` counts updates
and `iteration` counts tries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_api.config import TrainerConfig
from lora_api.run import Control
from lora_api.training import Precision
from lora_trainer.averages import Average
from lora_trainer.control import ControlWatch
from lora_trainer.course import enter
from lora_trainer.data.stream import Batches, MicroBatch
from lora_trainer.errors import NotFiniteError
from lora_trainer.history import Change
from lora_trainer.losses import loss_of
from lora_trainer.objective import seed_dropout
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import Agreement, Group, autocast
from lora_trainer.saver import Saves, Saving
from lora_trainer.settings import Settings
from lora_trainer.spread import Spread
from lora_trainer.stages import Stage, rate_at, stage_at, stages_of
from lora_trainer.state import TrainState
from lora_trainer.stopping import StopRequest
from lora_trainer.timing import PartTimer

if TYPE_CHECKING:
    from lora_trainer.families.base import BaseModel

log = logging.getLogger(__name__)

_SCALE_GROWTH_STEPS = 2000  # fp16: good updates before the loss scale is doubled
_LEAST_SCALE = 1.0


@dataclass
class Loop:
    """Trains from `state.step` to `settings.steps`.

    Args:
        config: What defines the run.
        settings: What may change while it runs.
        state: Counters; changed in place.
        model: Base model whose `forward_module` holds the adapter.
        optimizer: Over the adapter's parameters; from `optimizers.build_optimizer`.
        batches: Micro-batches in order.
        group: All ranks.
        stop: Set by signals.
        reporter: Told about every update.
        control: Newer settings, on rank 0.
        planned: Changes that come again at the steps at which an earlier start made them.
        average: Takes in the weights after each update.
        saves: Heard after each agreement: whether the last save went well.
        precision: Number format of the forward pass; None: `train.dtype`, which is not auto then.
        after_step: Called with the step after each update: saves and samples when they are due.
        stages: What changes at which step; those of `config` where they are left out.
        batches_of: Makes the micro-batches of a stage that begins.
        timer: Of the parts of a step.
        spread: How what is trained lies on the ranks.
        describe: A batch in words, for the report of an error in it.
    """

    config: TrainerConfig
    settings: Settings
    state: TrainState
    model: BaseModel
    optimizer: torch.optim.Optimizer
    batches: Batches
    group: Group
    stop: StopRequest
    reporter: Reporter
    control: ControlWatch | None = None
    planned: tuple[Change, ...] = ()
    saves: Saves | None = None
    average: Average | None = None
    after_step: Callable[[int, Settings], None] = lambda step, settings: None  # noqa: ARG005 - does nothing
    timer: PartTimer = field(default_factory=lambda: PartTimer(0))
    stages: tuple[Stage, ...] = ()
    batches_of: Callable[[Stage, TrainState], Batches] | None = None
    precision: Precision | None = None
    spread: Spread | None = None
    describe: Callable[[MicroBatch], str] = lambda batch: f"{len(batch.x_t)} samples of {tuple(batch.x_t.shape[1:])}"

    def __post_init__(self) -> None:
        self._parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._precision = self.precision or Precision(self.config.train.dtype)
        self._scaled = self._precision is Precision.FP16
        self._spread = self.spread or Spread(self.group, self.model.forward_module)
        self._apart = self._spread.apart(self._parameters)
        self._part = ""  # of a step that is being done
        self._batch: MicroBatch | None = None
        self._kind, self._delta = self.config.train.loss_type, self.config.train.huber_delta
        self._dropout = self.config.network.dropout > 0
        self.stages = self.stages or stages_of(self.config)
        self.stage = stage_at(self.stages, self.state.step)

    def run(self) -> bool:
        """Trains; returns False when it was asked to stop before the last step.

        Raises:
            NotFiniteError: When too many iterations in a row were not finite.
            BaseException: When the last save failed, or a newer start exists; see `Saves.heard`.
        """
        try:
            return self._run()
        except Exception:
            if self._part:  # else what is done after a step says itself what that is
                self.reporter.detail(self._doing())
            raise

    def _doing(self) -> str:
        batch = "" if self._batch is None else f" of {self.describe(self._batch)}"
        return f"training step {self.state.step + 1}, {self._part}{batch}"

    def _run(self) -> bool:
        while self.state.step < self.settings.steps:
            if self.stage.end is not None and self.state.step >= self.stage.end:
                self._enter_next_stage()
            begin = time.perf_counter()
            loss, norm = self._accumulate()
            news = self._news() is not None
            with self.timer.part("agree"):
                saving = self.saves.state if self.saves is not None else 0
                agreed = self.group.agree(loss, norm, stop=self.stop.requested, news=news, saving=saving)
            if self.saves is not None:
                self.saves.heard(Saving(agreed.saving))
            if agreed.finite:
                self._update(agreed, norm, begin)
            else:
                self._skip(agreed)
            if agreed.news:
                self._take_over(self.group.broadcast(self._news()))
            else:
                for change in [each for each in self.planned if self.state.step >= each.step]:
                    self._take_over(change.control)
            if agreed.stop or (self.group.world_size == 1 and self.stop.requested):
                return False
        return True

    def _accumulate(self) -> tuple[Tensor, Tensor]:
        """Mean loss and gradient norm over all micro-batches of an iteration, both () fp32 on the device."""
        count = self.stage.passes
        losses = []
        for micro in range(count):
            self._part, self._batch = "making a batch", None
            with self.timer.part("data"):
                batch = self.batches.next()
            with self._spread.without_sync() if micro < count - 1 else nullcontext():
                losses.append(self._forward_backward(batch, count))
        self._part, self._batch = "averaging gradients", None
        self.group.average([p.grad for p in self._apart if p.grad is not None])
        with self.timer.part("norm"):
            gradients = self._spread.held([p.grad for p in self._parameters if p.grad is not None])
            if self._scaled:
                torch._foreach_mul_(gradients, 1.0 / self.state.loss_scale)
            norm = self._spread.norm(gradients)
        return (losses[0] if count == 1 else torch.stack(losses).mean()), norm

    def _forward_backward(self, batch: MicroBatch, count: int) -> Tensor:
        if self._dropout:
            seed_dropout(self.config.train.seed, self.state.iteration, batch.slot, self.model.device)
        self._part, self._batch = "forward pass", batch
        with self.timer.part("forward"), autocast(self.model.device, self._precision):
            conditioning = self.model.conditioned(batch.conditioning, batch.captions)
            loss, raw = loss_of(
                self.model.predict(batch.x_t, batch.time, conditioning),
                batch.target,
                kind=self._kind,
                delta=self._delta if batch.delta is None else batch.delta,
                mask=batch.mask,
                weight_B=batch.loss_weight,
            )
        self._part = "backward pass"
        with self.timer.part("backward"):
            factor = (self.state.loss_scale if self._scaled else 1.0) / count
            (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        self.reporter.advanced()
        return raw.detach()

    def _update(self, agreed: Agreement, norm: Tensor, begin: float) -> None:
        train, state = self.config.train, self.state
        lr = rate_at(state.step, self.stage, train, self.settings)
        self._part = "update"
        with self.timer.part("optimizer"):
            if 0 < train.max_grad_norm < agreed.grad_norm:
                self._spread.clip(self._parameters, train.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update(state.step + 1)
        self._part = ""
        state.step += 1
        state.iteration += 1
        state.nonfinite_in_a_row = 0
        if self._scaled:
            self._grow_scale()
        lr *= getattr(self.optimizer, "d_used", 1.0)  # Prodigy finds its own rate
        self.reporter.stepped(
            step=state.step, loss=agreed.loss, lr=lr, grad_norm=agreed.grad_norm, seconds=time.perf_counter() - begin
        )
        with self.timer.part("save"):
            self.after_step(state.step, self.settings)
        means = self.timer.report(state.step)
        if means is not None and self.group.rank == 0:
            self.reporter.line(step=state.step, milliseconds=means)
            log.info(
                "step %d took in ms: %s", state.step, "  ".join(f"{name} {value:g}" for name, value in means.items())
            )

    def _skip(self, agreed: Agreement) -> None:
        state = self.state
        self.optimizer.zero_grad()
        state.iteration += 1
        if (
            self._scaled and state.loss_scale > _LEAST_SCALE
        ):  # gradients overflowed in fp16: expected, try a smaller scale
            state.loss_scale, state.good_steps = state.loss_scale / 2, 0
            return
        state.nonfinite_in_a_row += 1
        self.reporter.now.nonfinite_steps += 1
        self.reporter.line(step=state.step, iteration=state.iteration, skipped="not finite")
        log.warning(
            "iteration %d skipped: loss %g, gradient norm %g (%d in a row)",
            state.iteration, agreed.loss, agreed.grad_norm, state.nonfinite_in_a_row,
        )  # fmt: skip
        if state.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            raise NotFiniteError(
                f"the loss was not finite {state.nonfinite_in_a_row} times in a row after step {state.step} "
                "(config.train.max_nonfinite_steps); a lower learning rate or dtype: bf16 usually helps"
            )

    def _grow_scale(self) -> None:
        self.state.good_steps += 1
        if self.state.good_steps >= _SCALE_GROWTH_STEPS:
            self.state.loss_scale, self.state.good_steps = self.state.loss_scale * 2, 0

    def _enter_next_stage(self) -> None:
        """The batches that were made ahead for the old stage are let go."""
        assert self.batches_of is not None, "a run with several stages needs the batches of each"
        stage = self.stage = stage_at(self.stages, self.state.step)
        enter(stage, self.state)
        self.batches.close()
        self.batches = self.batches_of(stage, self.state)
        self.reporter.enter_stage(stage)
        rate = rate_at(self.state.step, stage, self.config.train, self.settings)
        log.info(
            "%s begins after step %d: batch %d x accumulation %d, lr %g",
            stage.name, self.state.step, stage.batch_size, stage.accumulation, rate,
        )  # fmt: skip

    def _news(self) -> Control | None:
        """On rank 0, a control document that is newer than all that is in force or planned."""
        known = self.planned[-1].control.generation if self.planned else self.settings.generation
        return self.control.newer_than(known) if self.control is not None else None

    def _take_over(self, document: Control) -> None:
        """The same document on every rank, at the end of the same iteration."""
        self.settings = self.settings.taking(document)
        self.planned = tuple(each for each in self.planned if each.control.generation > document.generation)
        self.reporter.now.steps = self.settings.steps
        self.reporter.settings_changed(self.state.step, document)
        log.info(
            "from step %d on: steps %d, lr %g, save_every %d (generation %d)",
            self.state.step, self.settings.steps, self.settings.lr, self.settings.save_every, self.settings.generation,
        )  # fmt: skip
