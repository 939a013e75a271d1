"""The first seconds of a start, before torch is imported: whose directory is it, which start are we, where do we go on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.run import Control, FinalManifest, Progress, RejectedCheckpoint, RunConfig, RunFile, config_hash
from lora_api.store import Store
from lora_trainer import checkpoint, clock, history
from lora_trainer.checkpoint import Checkpoint
from lora_trainer.control import read_control
from lora_trainer.errors import ConfigurationError
from lora_trainer.fence import Fence
from lora_trainer.history import Change
from lora_trainer.retry import place
from lora_trainer.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """What rank 0 found in the run directory. `fence` and `checkpoint` exist on rank 0 only."""

    start: int
    settings: Settings
    finished_step: int | None  # the job is done already, at this step
    manifest_key: str | None = None  # of the checkpoint to go on from
    step: int = 0
    lost_steps: int = 0
    rejected: tuple[RejectedCheckpoint, ...] = ()
    planned: tuple[Change, ...] = ()  # changes that an earlier start made after the checkpoint's step
    changed: bool = False  # whether the settings are newer than the checkpoint's


def begin(store: Store, run: RunConfig) -> tuple[Beginning, Fence | None, Checkpoint | None]:
    """Takes possession of the run directory and finds the checkpoint to go on from.

    Raises:
        ConfigurationError: When the directory belongs to another job, or its checkpoint to another configuration.
        CheckpointIntegrityError: When no committed checkpoint can be trusted.
        StoreError: When the store can't be used.
    """
    control = read_control(store)
    owner = read_run_file(store)
    check_owner(owner, run, store.location)
    final = _final(store)
    if final is not None and final.uid == run.uid:
        log.info("%s exists: the job finished at step %d", place(store, layout.FINAL_MANIFEST), final.step)
        return Beginning(final.start, Settings.of(run.config, control), final.step), None, None
    fence = Fence.raise_up(store, run.attempt)
    if owner is None or owner.uid != run.uid:
        write_run_file(store, run)
        check_owner(read_run_file(store), run, store.location)  # another job may have done the same just now
    newest, rejected = checkpoint.newest(store)
    if newest is not None:
        check_config(newest, run)
    step = newest.manifest.step if newest else 0
    recorded = history.recorded_control(newest.files[checkpoint.STATE], run.config) if newest else None
    settings, planned = _settings(store, run.config, control, recorded, step)
    beginning = Beginning(
        start=fence.claim.start,
        settings=settings,
        finished_step=None,
        manifest_key=newest.manifest_key if newest else None,
        step=step,
        lost_steps=lost_steps(_progress(store), step),
        rejected=rejected,
        planned=planned,
        changed=recorded is not None and _differ(settings, Settings.of(run.config, recorded)),
    )
    return beginning, fence, newest


def _settings(
    store: Store, config: TrainerConfig, control: Control | None, recorded: Control | None, step: int
) -> tuple[Settings, tuple[Change, ...]]:
    """What to go on with, and what changes again later; metric lines are read only where a change may be among them."""
    if control is None or recorded is None or recorded.generation >= control.generation:
        return Settings.of(config, control), ()
    return history.settings_at(config, control, recorded, history.changes_in(history.read_lines(store)), step)


def _differ(now: Settings, before: Settings) -> bool:
    """Whether something is another; a document that says what was so already changes nothing."""
    return replace(now, generation=0) != replace(before, generation=0)


def check_owner(owner: RunFile | None, run: RunConfig, location: str) -> None:
    """Refuses a directory of another job unless told to continue it.

    Raises:
        ConfigurationError: When it belongs to another job.
    """
    if owner is None or owner.uid == run.uid or run.if_exists == "Continue":
        return
    raise ConfigurationError(
        f"output.path: {location} belongs to {owner.namespace}/{owner.job_name} (uid {owner.uid}), begun {owner.created_at}; "
        "choose another path, or set output.ifExists: Continue to go on from its newest checkpoint"
    )


def check_config(newest: Checkpoint, run: RunConfig) -> None:
    """Refuses a checkpoint that another configuration made.

    Raises:
        ConfigurationError: When the hashes differ.
    """
    found, expected = newest.manifest.config_hash, config_hash(run.config)
    if found != expected:
        raise ConfigurationError(
            f"config: the checkpoint of step {newest.manifest.step} was made with another configuration (hash {found}, this one "
            f"has {expected}); only save, sample, train.steps and train.lr may differ. Restore the configuration, or choose "
            "another output.path"
        )


def lost_steps(previous: Progress | None, step: int) -> int:
    """Steps that were done and must be done again, over all starts.

    Args:
        previous: The last heartbeat of the start before.
        step: Where this start goes on.
    """
    return 0 if previous is None else previous.lost_steps + max(0, previous.step - step)


def read_run_file(store: Store) -> RunFile | None:
    """Whose directory it is.

    Raises:
        ConfigurationError: When the document can't be read.
    """
    raw = store.get(layout.RUN_FILE)
    if raw is None:
        return None
    try:
        return RunFile.model_validate_json(raw)
    except ValueError as error:
        raise ConfigurationError(f"output.path: {place(store, layout.RUN_FILE)} is not readable: {error}") from error


def write_run_file(store: Store, run: RunConfig) -> None:
    """Makes the directory this job's."""
    document = RunFile(
        uid=run.uid,
        job_name=run.job_name,
        namespace=run.namespace,
        config_hash=config_hash(run.config),
        created_at=clock.now(),
    )
    store.put(layout.RUN_FILE, document.model_dump_json(by_alias=True).encode())


def _final(store: Store) -> FinalManifest | None:
    raw = store.get(layout.FINAL_MANIFEST)
    try:
        return FinalManifest.model_validate_json(raw) if raw is not None else None
    except ValueError:
        log.warning("%s is not readable and will be written again", place(store, layout.FINAL_MANIFEST))
        return None


def _progress(store: Store) -> Progress | None:
    raw = store.get(layout.PROGRESS)
    try:
        return Progress.model_validate_json(raw) if raw is not None else None
    except ValueError:
        return None
