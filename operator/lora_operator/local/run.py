"""`lora-operator run`: drives the reconciler over the local engine until the job has ended or somebody stops it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from lora_api import layout
from lora_api.job import ConditionType, JobStatus, Phase
from lora_api.problems import InvalidDocument
from lora_api.run import Progress
from lora_api.store import StoreError
from lora_operator.adapters.local import LocalCluster
from lora_operator.adapters.local_state import BusyError, Objects, write_atomically
from lora_operator.adapters.local_stores import LocalStores
from lora_operator.core.conditions import condition_of, holds, is_terminal
from lora_operator.core.read import read_status
from lora_operator.core.times import format_time
from lora_operator.core.views import Event, Manifest
from lora_operator.local.admission import admit, begin_again, end_leftovers
from lora_operator.local.liveview import Snapshot, View
from lora_operator.local.prepare import Prepared, UserError
from lora_operator.ports import Clock
from lora_operator.reconciler import Reconciler

_LONGEST_WAIT_SECONDS = 5.0
_FINISHING_SECONDS = 60.0  # a trainer that has committed its result may take this long to leave
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: JobStatus
    job: Manifest
    signal: int | None = None  # that ended it before its time
    seconds: float = 0.0
    was_over: bool = False  # it had succeeded before; nothing was run

    @property
    def succeeded(self) -> bool:
        """Whether the adapter is there."""
        return holds(self.status, ConditionType.SUCCEEDED)

    @property
    def exit_code(self) -> int:
        """0 only when it succeeded; 128 + signal where one ended it; else 1."""
        if self.succeeded:
            return 0
        return 128 + self.signal if self.signal else 1


def run_job(
    prepared: Prepared, view: View, clock: Clock, *, preempt_at: Sequence[int] = (), write_status: Path | None = None
) -> Outcome:
    """Runs the job to its end, or to the first signal. Raises UserError."""
    state = prepared.state
    try:
        with state.locked():
            # the reconciler's own words: a panel leaves no place for them on the screen
            logging.basicConfig(filename=state.folder / "operator.log", level=logging.INFO, format=_LOG_FORMAT)
            for note in prepared.notes:
                view.note(note, clock.now())
            objects = open_objects(prepared, view, clock)
            run = LocalRun(prepared, objects, view, clock, preempt_at=preempt_at, write_status=write_status)
            if holds(read_status(objects.job), ConditionType.SUCCEEDED):
                return run.already_over()
            return asyncio.run(run.run())
    except BusyError as error:
        text = f"{prepared.key} is being run already by {error}; its state is in {state.folder}"
        raise UserError(text) from error
    except StoreError as error:
        raise UserError(f"the store can't be used: {error}") from error
    except OSError as error:
        raise UserError(f"{error.filename or state.folder}: can't be written: {error.strerror or error}") from error


def open_objects(prepared: Prepared, view: View, clock: Clock) -> Objects:
    """What is there to begin with; says what it finds. Raises UserError, StoreError, OSError."""
    state = prepared.state
    if state.has_leftovers():
        view.note("the run before this one was killed; its trainer is given time to save", clock.now())
    messages = state.stop_leftovers()
    state.remove_old_logs()
    saved = state.load()
    begun = prepared.is_begun()
    if saved is not None and not begun:
        if read_status(saved.job).progress is not None:
            view.note(f"{prepared.run_store.location} is gone: beginning anew", clock.now())
        state.forget()
        saved = None
    try:
        objects = admit(prepared.manifest, saved, prepared.uid, format_time(clock.now()))
    except InvalidDocument as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        where = prepared.run_store.location
        text = f"{prepared.key} has changed since it was begun:\n{lines}\nundo that, or begin another run with a new"
        raise UserError(f"{text} metadata.name; or remove {where} to begin this one anew") from error
    end_leftovers(objects, messages, format_time(clock.now()))
    before = read_status(objects.job)
    if begin_again(objects):
        why = condition_of(before, ConditionType.FAILED)
        view.note(f"trying again: the last try failed ({why.reason if why else 'Failed'})", clock.now())
    elif begun and not is_terminal(before):
        newest = before.checkpoints.newest_step
        view.note("going on" + (f" from the checkpoint of step {newest}" if newest else ""), clock.now())
    return objects


class LocalRun:
    """One call of `lora-operator run`."""

    def __init__(
        self,
        prepared: Prepared,
        objects: Objects,
        view: View,
        clock: Clock,
        *,
        preempt_at: Sequence[int] = (),
        write_status: Path | None = None,
    ) -> None:
        self._prepared, self._view, self._clock = prepared, view, clock
        self._cluster = LocalCluster(
            prepared.state,
            objects,
            profile=prepared.profile,
            clock=clock,
            machine=prepared.machine,
            on_event=self._show_event,
        )
        is_remote = not Path(prepared.store.location).is_absolute()
        self._look_seconds = 2.0 if is_remote else 0.5
        self._reconciler = Reconciler(
            self._cluster,
            LocalStores(prepared.credentials),
            clock,
            in_cluster=False,
            poll_seconds=5.0 if is_remote else 1.0,
        )
        self._preempt_at = sorted(preempt_at)
        self._write_status_to, self._written_version = write_status, ""
        self._progress: Progress | None = None
        self._signal: int | None = None

    def already_over(self) -> Outcome:
        """The outcome of a job that had succeeded before."""
        self._write_status()
        return Outcome(self._status, self._cluster.job, was_over=True)

    async def run(self) -> Outcome:
        """Runs until the job has ended or is suspended by a signal."""
        began = self._clock.now()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        watcher = asyncio.create_task(self._watch_progress())
        try:
            await self._drive()
        finally:
            watcher.cancel()
            self._cluster.stop()  # nothing runs any more, unless an error brought us here
            await self._cluster.join()
            self._write_status()
            self._show()
        seconds = (self._clock.now() - began).total_seconds()
        return Outcome(self._status, self._cluster.job, self._signal, seconds)

    @property
    def _status(self) -> JobStatus:
        return read_status(self._cluster.job)

    async def _drive(self) -> None:
        while True:
            self._cluster.changed.clear()
            delay = await self._reconciler.reconcile(self._prepared.key)
            self._write_status()
            self._show()
            if self._is_over():
                break
            wait = _LONGEST_WAIT_SECONDS if delay is None else min(delay, _LONGEST_WAIT_SECONDS)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._cluster.changed.wait(), wait)
        if self._status.phase is Phase.SUCCEEDED:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._cluster.join(), _FINISHING_SECONDS)

    def _is_over(self) -> bool:
        status = self._status
        if is_terminal(status):
            return True
        if status.phase is Phase.INVALID:
            return True
        return self._signal is not None and status.phase is Phase.SUSPENDED and self._cluster.is_idle

    def _on_signal(self, number: int) -> None:
        if self._signal is None:
            self._signal = number
            text = "stopping: the trainer saves a checkpoint first"
            if number == signal.SIGINT:
                text += " (Ctrl-C again kills it)"
            self._cluster.suspend()
            self._note(text)
        else:
            self._cluster.kill()

    async def _watch_progress(self) -> None:
        """Follows the heartbeat more closely than the status does, for the view and for `--preempt-at`."""
        store = self._prepared.run_store
        first = True
        while True:
            with suppress(StoreError, ValidationError):
                data = await asyncio.to_thread(store.get, layout.PROGRESS)
                self._progress = Progress.model_validate_json(data) if data else None
            if first:
                passed = self._progress.step if self._progress else 0
                self._preempt_at = [step for step in self._preempt_at if step > passed]
                first = False
            self._preempt_when_due()
            self._show()
            await asyncio.sleep(self._look_seconds)

    def _preempt_when_due(self) -> None:
        beat = self._progress
        if beat is None or not self._preempt_at or beat.exit is not None or beat.attempt != self._status.attempt:
            return
        due = [step for step in self._preempt_at if step <= beat.step]
        if due and self._cluster.preempt(f"preempted on purpose at step {beat.step} (--preempt-at {due[-1]})"):
            self._preempt_at = [step for step in self._preempt_at if step > beat.step]
            self._note(f"preempting the job at step {beat.step}, as asked for")

    def _show(self) -> None:
        with suppress(OSError):  # a closed terminal or pipe must not end the training
            self._view.update(Snapshot(self._prepared.key, self._status, self._progress), self._clock.now())

    def _note(self, text: str) -> None:
        with suppress(OSError):
            self._view.note(text, self._clock.now())

    def _show_event(self, event: Event) -> None:
        if self._signal is not None and event.reason == "Suspended":
            return  # the closing lines say it in the words of this command
        with suppress(OSError):
            self._view.event(event, self._clock.now())

    def _write_status(self) -> None:
        """The job object, to the file that was asked for, whenever it has changed."""
        path, job = self._write_status_to, self._cluster.job
        version = job["metadata"]["resourceVersion"]
        if path is None or version == self._written_version:
            return
        self._written_version = version
        is_json = path.suffix == ".json"
        text = json.dumps(job, indent=2) + "\n" if is_json else yaml.safe_dump(job, sort_keys=False, allow_unicode=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            self._note(f"{path}: can't be written: {error.strerror}")
            self._write_status_to = None
