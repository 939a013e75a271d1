"""One start from its claim to its word: the order in which everything happens."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from lora_api.problems import parse
from lora_api.run import ExitWord, RunConfig
from lora_api.store import Store
from lora_api.stores import Credentials, credentials_from_folder, open_store
from lora_trainer import endings
from lora_trainer.beginning import Beginning, begin
from lora_trainer.environment import Environment
from lora_trainer.errors import ConfigurationError, FencedError, TransientError
from lora_trainer.fence import Fence
from lora_trainer.peers import PeerWatch
from lora_trainer.reporting import Reporter
from lora_trainer.retry import RetryingStore
from lora_trainer.stopping import Stopped, StopRequest
from lora_trainer.views import view_for_stderr

log = logging.getLogger(__name__)


def read_run_config(path: Path) -> RunConfig:
    """The run configuration in a file.

    Raises:
        ConfigurationError: When the file is missing or not JSON.
        InvalidDocument: When it does not fit its type; names every field.
    """
    try:
        return parse(RunConfig, json.loads(path.read_text()))
    except OSError as error:
        raise ConfigurationError(f"{path}: the run configuration can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: the run configuration is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: the run configuration is not JSON: {error}") from error


def read_credentials(folder: Path | None, run: RunConfig) -> Credentials | None:
    """The mounted Secret; None where there is none and the run directory does not need it.

    Raises:
        StoreCredentialsError: When the run directory is in S3 and the Secret has no keys.
    """
    if folder is None or (run.store.type == "directory" and not (folder / "accessKey").is_file()):
        return None
    return credentials_from_folder(folder)


def train(path: Path, environment: Environment, stop: StopRequest) -> int:
    """Runs one start to its end; returns the exit code. Never raises: every ending has its word."""
    start = Start(environment, stop)
    stop.last_words = lambda: endings.write_word(start.word_for(Stopped(stop.signal_name)), environment)
    try:
        start.run(path)
        step = start.committed_step
        word = endings.done_word(step, f"finished at step {step}")
    except BaseException as error:  # noqa: BLE001 - whatever ends a start is put into words
        word = start.word_for(error)
    start.peers.close()
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

    def __post_init__(self) -> None:
        several = self.environment.local_world_size > 1
        self.peers = PeerWatch(self.environment.word_folder if several else None, self.environment.rank, self._follow)

    def _follow(self, lost: str) -> None:
        """Ends this process after another rank, from the thread that saw it: the main thread waits for that rank."""
        word = self.word_for(TransientError(f"{lost}; this rank waited for it"))
        endings.write_word(word, self.environment)
        self.reporter.close(word)
        logging.shutdown()
        os._exit(word.code)

    def word_for(self, error: BaseException) -> ExitWord:
        """The word for what ended this start; unforeseen errors are logged with their traceback."""
        if self.stop.requested and endings.is_collective_error(error):
            error = Stopped(self.stop.signal_name)  # the others were asked to stop too, and left first
        if isinstance(error, FencedError):
            self.reporter.fenced = error  # the newer start reports from now on
        now = self.reporter.now
        doing = now.detail or (f"training step {now.step + 1}" if now.stage == "Training" else "")
        word = endings.word_of(error, self.committed_step, now.stage, doing)
        if word.code == endings.PLAIN_FAILURE:
            log.error("unexpected error", exc_info=error)
        else:
            log.log(logging.INFO if isinstance(error, Stopped) else logging.ERROR, "%s", word.message)
        return word

    def run(self, path: Path) -> None:
        """Claims, prepares, trains, finishes. Raises what `endings` has words for."""
        run = read_run_config(path)
        credentials = read_credentials(self.environment.credentials_folder, run)
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
        self.peers.start()
        beginning = group.broadcast(beginning)
        if beginning.finished_step is None:
            from lora_trainer.session import Session

            session = Session(self, run, beginning, store, credentials, fence, group, newest)
            del newest  # its bytes are let go once they are restored
            session.train()
        group.close()

    def _open_reporter(self, store: Store, run: RunConfig, beginning: Beginning, fence: Fence | None) -> None:
        self.reporter = Reporter(
            store, beginning.start, run.attempt, self.environment.heartbeat_seconds, fence=fence, view=view_for_stderr()
        )
        now = self.reporter.now
        now.step = now.committed_step = beginning.step
        now.steps = beginning.settings.steps
        now.resumed_from_step = beginning.step if beginning.manifest_key else None
        now.lost_steps, now.rejected = beginning.lost_steps, beginning.rejected
        self.reporter.detail("importing libraries")
        self.reporter.open()
        if self.environment.metrics_port:
            from lora_trainer.exporter import serve

            serve(now, self.environment.metrics_port)
