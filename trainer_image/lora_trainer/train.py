"""One start from its claim to its word: the order in which everything happens."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_api.problems import parse
from lora_api.run import ExitWord, RunConfig, config_hash
from lora_api.stores import Credentials, credentials_from_folder, open_store
from lora_trainer import checkpoint, clock, endings
from lora_trainer.beginning import Beginning, begin
from lora_trainer.checkpoint import Checkpoint
from lora_trainer.control import ControlWatch
from lora_trainer.environment import Environment
from lora_trainer.errors import ConfigurationError
from lora_trainer.fence import Fence
from lora_trainer.reporting import Reporter
from lora_trainer.retry import RetryingStore
from lora_trainer.settings import Settings
from lora_trainer.stopping import Stopped, StopRequest
from lora_trainer.views import view_for_stderr

if TYPE_CHECKING:
    import torch

    from lora_trainer.prepare import Prepared
    from lora_trainer.runtime import Group
    from lora_trainer.state import TrainState

log = logging.getLogger(__name__)


def read_run_config(path: Path) -> RunConfig:
    """The run configuration in a file.

    Raises:
        ConfigurationError: When the file is missing or not JSON.
        InvalidDocument: When it does not fit its type; names every field.
    """
    import json

    try:
        return parse(RunConfig, json.loads(path.read_text()))
    except OSError as error:
        raise ConfigurationError(f"{path}: the run configuration can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: the run configuration is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: the run configuration is not JSON: {error}") from error


def train(path: Path, environment: Environment, stop: StopRequest) -> int:
    """Runs one start to its end; returns the exit code. Never raises: every ending has its word."""
    start = Start(environment, stop)
    try:
        start.run(path)
        step = start.committed_step
        word = endings.done_word(step, f"finished at step {step}")
    except BaseException as error:  # noqa: BLE001 - whatever ends a start is put into words
        word = start.word_for(error)
    with stop.deferred():
        endings.write_word(word, environment)
        start.reporter.close(word)
    return word.code


@dataclass
class Start:
    """One start. Its fields are filled in as it goes on."""

    environment: Environment
    stop: StopRequest
    reporter: Reporter = field(default_factory=lambda: Reporter(None, 0, 0))
    committed_step: int = 0

    def word_for(self, error: BaseException) -> ExitWord:
        """The word for what ended this start; unforeseen errors are logged with their traceback."""
        if self.stop.requested and endings.is_collective_error(error):
            error = Stopped(self.stop.signal_name)  # the others were asked to stop too, and left first
        word = endings.word_of(error, self.committed_step)
        if word.code == endings.PLAIN_FAILURE:
            log.error("unexpected error", exc_info=error)
        else:
            log.log(logging.INFO if isinstance(error, Stopped) else logging.ERROR, "%s", word.message)
        return word

    def run(self, path: Path) -> None:
        """Claims, prepares, trains, finishes. Raises what `endings` has words for."""
        run = read_run_config(path)
        folder = self.environment.credentials_folder
        credentials = credentials_from_folder(folder) if folder is not None else None
        plain = open_store(run.store, credentials).sub(run.path)
        store = RetryingStore(plain)
        beginning, fence, newest = None, None, None
        if self.environment.leads:
            beginning, fence, newest = begin(store, run)
            self.committed_step = beginning.finished_step or beginning.step
            if beginning.finished_step is None:
                self._open_reporter(plain, run, beginning, fence)
        from lora_trainer import runtime  # torch takes seconds: the claim and the first heartbeat do not wait for it

        device = runtime.device_for(run.config.device, self.environment.local_rank)
        group = runtime.Group.form(self.environment, device)
        beginning = group.broadcast(beginning)
        if beginning.finished_step is None:
            Session(self, run, beginning, store, credentials, fence, group).train(newest, device)
        group.close()

    def _open_reporter(self, store: RetryingStore | object, run: RunConfig, beginning: Beginning, fence: Fence | None) -> None:
        raise NotImplementedError
