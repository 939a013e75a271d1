"""The part of a start that needs torch: prepare, train, save, finish."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_api.run import CheckpointManifest, RunConfig, config_hash
from lora_api.store import Store
from lora_api.stores import Credentials
from lora_trainer import checkpoint, clock
from lora_trainer.averages import build_average, standing_in
from lora_trainer.beginning import Beginning
from lora_trainer.checkpoint import Checkpoint
from lora_trainer.control import ControlWatch
from lora_trainer.course import Course, enter
from lora_trainer.data.captions import prompts_of
from lora_trainer.data.samples import described
from lora_trainer.data.stream import MicroBatch
from lora_trainer.errors import CheckpointIntegrityError, TransientError
from lora_trainer.export import portable_files
from lora_trainer.fence import Fence
from lora_trainer.finalize import finish, put_samples
from lora_trainer.loop import Loop
from lora_trainer.optimizers import build_optimizer
from lora_trainer.prepare import Preparation
from lora_trainer.prompts import take_prompts
from lora_trainer.records import Told
from lora_trainer.retention import remove_old_checkpoints
from lora_trainer.retry import place
from lora_trainer.runtime import Group, synchronise
from lora_trainer.sampling import each_pass
from lora_trainer.saver import Saver, Saves, Saving, Snapshot
from lora_trainer.settings import Settings
from lora_trainer.stages import stage_at, stages_of
from lora_trainer.state import TrainState, finished, snapshot, take_part_in_snapshot, unpack
from lora_trainer.stopping import Stopped
from lora_trainer.tensorfile import HostBuffers, TensorFile
from lora_trainer.timing import PartTimer

if TYPE_CHECKING:
    from lora_trainer.train import Start

log = logging.getLogger(__name__)


@dataclass
class Session:
    """One rank's work between claim and end.

    Args:
        start: Reports, stop request and environment of this process.
        run: What to train.
        beginning: What rank 0 found in the run directory.
        store: The run directory, with retries.
        credentials: Of S3 stores.
        fence: The claim, on rank 0.
        group: All ranks.
        newest: The checkpoint to go on from, on rank 0, which has read it already.
    """

    start: Start
    run: RunConfig
    beginning: Beginning
    store: Store
    credentials: Credentials | None
    fence: Fence | None
    group: Group
    newest: Checkpoint | None
    _buffers: HostBuffers = field(default_factory=HostBuffers)

    def train(self) -> None:
        """Goes on from the checkpoint until the job is done.

        Raises:
            Stopped: When it was asked to stop; what was trained is committed then.
        """
        reporter, stop = self.start.reporter, self.start.stop
        reporter.enter("PreparingData", "importing libraries")
        self.prepared = Preparation(
            self.run, self.start.environment, self.credentials, self.group.device, self.group, reporter, stop,
            fresh=self.beginning.manifest_key is None, sample_prompts=self.beginning.settings.sample.prompts,
        ).prepare()  # fmt: skip
        self._restore()
        stop.check()
        with stop.deferred():
            done = self._train_and_save()
        if not done:
            raise Stopped(stop.signal_name)
        reporter.enter("Finalizing")
        stop.check()
        with standing_in(self.average):
            self._finish()
        self.group.wait(stop.check)
        reporter.detail("finished")

    def _finish(self) -> None:
        prepared, reporter = self.prepared, self.start.reporter
        prepared.adapter.collect(keep=self.fence is not None)
        if self.fence is not None or prepared.spread.sharded:
            self._take_prompts(self._say)
        if self.fence is not None:
            finish(
                prepared, self.settings, self.run, store=self.store, fence=self.fence, step=self.state.step,
                told=Told(self.beginning.start, reporter.told(), reporter.now, self.saves.stall_seconds),
                report=self._say,
            )  # fmt: skip
        elif prepared.spread.sharded:
            put_samples(prepared, self.settings, None, self.state.step, self._say)

    def _restore(self) -> None:
        """Optimizer, counters and settings, from the checkpoint if there is one."""
        self.settings = self.beginning.settings
        train = self.run.config.train
        groups = self.prepared.adapter.optimizer_groups(
            train.lr, denoiser_lr=train.unet_lr, text_lr=train.text_encoder_lr
        )
        self.optimizer = build_optimizer(groups, train)
        self.average = build_average(self.prepared.adapter.parameters(), self.optimizer, train)
        self.state = TrainState()
        if self.beginning.manifest_key is not None:
            self.prepared.spread.by_turns(self._restore_checkpoint)
        self.start.committed_step = self.state.step

    def _restore_checkpoint(self) -> None:
        assert self.beginning.manifest_key is not None
        found, self.newest = self.newest or self._read_again(self.beginning.manifest_key), None
        try:
            self.state = unpack(found.files, self.prepared.adapter, self.optimizer, self.average)
        except (ValueError, KeyError) as error:
            raise CheckpointIntegrityError(f"{found.manifest_key}: does not fit this adapter: {error}") from error
        log.info("resumed from %s", found.manifest_key)

    def _read_again(self, key: str) -> Checkpoint:
        """The checkpoint that rank 0 chose, on another rank."""
        raw = self.store.get(key)
        found = checkpoint.read(self.store, key, CheckpointManifest.model_validate_json(raw)) if raw else "it is gone"
        if isinstance(found, str):
            raise TransientError(
                f"{place(self.store, key)}: rank 0 could read it, rank {self.group.rank} could not: {found}"
            )
        return found

    def _train_and_save(self) -> bool:
        """Whether the last step was reached; what was trained is committed."""
        self.saves = Saves(
            self._saver(), self.group, self.start.reporter, self.start.committed_step, heard_of_commit=self._heard
        )
        self.start.peers.saves = lambda: self.saves.state is Saving.BUSY
        try:
            done = self._loop()
            if self.state.step > self.saves.taken_step:
                self.saves.save(self.state.step, self._snapshot)
            self.saves.finish()
        finally:
            self.saves.close()
        return done

    def _loop(self) -> bool:
        config, reporter, model = self.run.config, self.start.reporter, self.prepared.model
        stages = stages_of(config, self.run.shrunk)
        course = Course(self.prepared, config.train, self.group)
        stage = stage_at(stages, self.state.step)
        enter(stage, self.state)
        reporter.take_stages(stages, stage, self.group.world_size)
        reporter.enter("Training")
        if self.beginning.changed:  # a start after this one has to know from where on
            reporter.settings_changed(self.state.step, self.settings.document)
        control = ControlWatch(reporter.store) if self.fence is not None and reporter.store is not None else None
        if control is not None:
            control.start()
        loop = Loop(
            config=config, settings=self.settings, state=self.state, model=model, optimizer=self.optimizer,
            batches=course.batches(stage, self.state), batches_of=course.batches, stages=stages, group=self.group,
            stop=self.start.stop, reporter=reporter, control=control, planned=self.beginning.planned, saves=self.saves,
            average=self.average, after_step=self._after_step, precision=self.prepared.precision,
            spread=self.prepared.spread, describe=self._described,
            timer=PartTimer(config.performance_log_every, lambda: synchronise(self.group.device)),
        )  # fmt: skip
        try:
            done = loop.run()
            self.settings = loop.settings
        finally:
            loop.batches.close()
            if control is not None:
                control.close()
        return done

    def _described(self, batch: MicroBatch) -> str:
        return described([self.prepared.samples[number] for number in batch.samples])

    def _after_step(self, step: int, settings: Settings) -> None:
        self.settings = settings
        if step % settings.save_every == 0 and step < settings.steps:
            self.saves.save(step, self._snapshot)
        every = settings.sample.sample_every
        if every and step % every == 0 and step < settings.steps and settings.sample.prompts:
            self._draw(step)

    def _saver(self) -> Saver | None:
        if self.fence is None:
            return None
        return Saver(self.store, self.fence, self.run.uid, config_hash(self.run.config), self._committed)

    def _snapshot(self) -> Snapshot | None:
        """What is trained as it stands, on the host; on rank 0."""
        if self.fence is None:
            if self.prepared.spread.sharded:
                take_part_in_snapshot(self.prepared.adapter, self.optimizer)
            return None
        begun, adapter, model = clock.seconds(), self.prepared.adapter, self.prepared.model
        files = snapshot(
            adapter, self.optimizer, self.state, self._facts(), buffers=self._buffers, average=self.average
        )
        synchronise(self.group.device)
        held = files[checkpoint.ADAPTER]
        assert isinstance(held, TensorFile)
        return Snapshot(
            self.state.step,
            lambda: finished(files) | portable_files(model, adapter.standing_at(held.tensors)),
            begun,
        )

    def _committed(self, manifest: CheckpointManifest) -> None:
        """In the saving thread of rank 0."""
        reporter = self.start.reporter
        reporter.now.save_seconds = max(reporter.now.save_seconds or 0.0, manifest.save_seconds)
        reporter.now.committed_step = self.start.committed_step = manifest.step
        reporter.committed()
        if self.start.environment.removes_checkpoints:
            remove_old_checkpoints(self.store, self.settings.max_step_saves)

    def _heard(self, step: int) -> None:
        self.start.committed_step = step

    def _draw(self, step: int) -> None:
        if self.fence is not None or self.prepared.spread.sharded:
            store = self.store if self.fence is not None else None
            try:
                # each rank encodes as many captions as it has to: no place to agree on stopping
                self._take_prompts(self._say if self.prepared.spread.sharded else self._say_unless_stopping)
                with standing_in(self.average), each_pass(self.prepared.model, self.start.reporter.advanced):
                    put_samples(self.prepared, self.settings, store, step, self._say_unless_stopping)
            except Stopped:
                log.info("drawing samples of step %d was cut short", step)
            self.start.reporter.detail("")
        self.group.wait(lambda: None)

    def _take_prompts(self, report: Callable[[str], None]) -> None:
        on_any = self.group.any if self.prepared.spread.sharded else bool  # else only rank 0 draws
        prompts = prompts_of(self.settings.sample.prompts, self.run.config.trigger_word)
        with self.start.reporter.long_work():
            take_prompts(self.prepared, prompts, report, on_any)

    def _facts(self) -> dict[str, object]:
        return {
            "seed": self.run.config.train.seed,
            "data_digest": self.prepared.data_digest,
            "world_size": self.group.world_size,
            "control": self.settings.document.model_dump(mode="json", by_alias=False),
        }

    def _say(self, text: str) -> None:
        self.start.stop.check()
        self.start.reporter.detail(text)

    def _say_unless_stopping(self, text: str) -> None:
        stop = self.start.stop
        # where every rank draws, all of them cut it short or none does
        if self.group.any(stop.requested) if self.prepared.spread.sharded else stop.requested:
            raise Stopped(stop.signal_name)
        self.start.reporter.detail(text)
