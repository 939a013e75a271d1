"""The folder of a run that was begun on the command line: whose it is, what is in it, and what the user is told of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_api import layout
from lora_api.config import MUTABLE_CONFIG_PATHS
from lora_api.exit_codes import ExitCode
from lora_api.names import base_name
from lora_api.order import without_its_end
from lora_api.run import FinalManifest, RunConfig, RunFile
from lora_api.shrink import passes
from lora_api.store import StoreError
from lora_api.stores import DirectoryStore
from lora_api.training import TrainConfig
from lora_api.wording import short
from lora_trainer.commandline.refusal import Refusal

NAMESPACE = "command-line"
"""In `run.json`: tells these runs from those of an operator."""

RUN_CONFIG = "run-config.json"
"""What was run, beside the run directory's own documents; workers read it, and the next start compares with it."""

_FREE = (*MUTABLE_CONFIG_PATHS, ("device",), ("performance_log_every",))


def uid_of(folder: Path) -> str:
    """The uid of the run in a folder: the one it has, wherever the folder was moved, or one made from its place.

    Raises:
        Refusal: When the folder belongs to a job of an operator.
    """
    try:
        raw = DirectoryStore(folder).get(layout.RUN_FILE)
        owner = RunFile.model_validate_json(raw) if raw is not None else None
    except (StoreError, ValueError) as error:
        raise Refusal(f"--output_dir: {folder / layout.RUN_FILE} is not readable: {error}") from error
    if owner is None:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, folder.resolve().as_uri()))
    if owner.namespace != NAMESPACE:
        raise Refusal(
            f"--output_dir: {folder} belongs to the job {owner.namespace}/{owner.job_name}, begun {owner.created_at}; choose "
            "another folder"
        )
    return owner.uid


def document_of(folder: Path, uid: str, config: dict[str, Any], processes: int) -> dict[str, Any]:
    """The run configuration of a run in a folder."""
    return {
        "jobName": base_name(folder.name or "run"),
        "namespace": NAMESPACE,
        "uid": uid,
        "attempt": 1,
        "config": config,
        "store": {"name": "output", "type": "directory", "directory": str(folder.parent)},
        "path": folder.name,
        "processesPerNode": processes,
    }


def write_run_config(folder: Path, run: RunConfig) -> Path:
    """Leaves the run configuration in the folder, which is made.

    Raises:
        Refusal: When it can't be written.
    """
    text = run.model_dump_json(by_alias=True, indent=2, exclude_none=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        DirectoryStore(folder).put(RUN_CONFIG, text.encode())
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Refusal(f"--output_dir: {folder} can't be written to: {reason}") from error
    return folder / RUN_CONFIG


def shrunk_before(folder: Path, train: TrainConfig) -> int:
    """How often the run in a folder was made smaller because memory ran out; 0 when its micro-batches are others now."""
    raw = DirectoryStore(folder).get(RUN_CONFIG)
    try:
        before = RunConfig.model_validate_json(raw) if raw is not None else None
    except ValueError:
        return 0
    same = before is not None and passes(before.config.train, 0) == passes(train, 0)
    return before.shrunk if before is not None and same else 0


def refuse_other_settings(folder: Path, run: RunConfig, flag_of: dict[str, str]) -> None:
    """A checkpoint can only be gone on from with the settings that made it.

    Args:
        folder: The run directory.
        run: What is to be run.
        flag_of: Path of a field -> the flag that stands for it.

    Raises:
        Refusal: With each setting that differs and both its values.
    """
    store = DirectoryStore(folder)
    raw = store.get(RUN_CONFIG)
    if raw is None or not any(layout.is_checkpoint_manifest(item.key) for item in store.list(layout.CHECKPOINTS)):
        return
    try:
        before = _what_defines(RunConfig.model_validate_json(raw))
    except ValueError:
        return  # the trainer compares hashes and will say so
    found = [
        f"{flag_of.get('.'.join(path), 'setting')} ({'.'.join(path)}): is {short(now)}, but the run was begun with {short(was)}"
        for path, was, now in _differences(before, _what_defines(run))
        if not any(path[: len(free)] == free for free in _FREE)
    ]
    if found:
        hint = f"{folder} has checkpoints of these settings: keep them, or choose another --output_dir"
        raise Refusal("\n".join([*found, hint]))


def _what_defines(run: RunConfig) -> dict[str, Any]:
    wire = run.config.model_dump(mode="json")
    return wire | {"train": without_its_end(wire["train"])}


def _differences(was: Any, now: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from _differences(was.get(key), now.get(key), (*path, key))
    elif was != now:
        yield path, was, now


def reopen_if_longer(folder: Path, uid: str, steps: int) -> str | None:
    """Lets a finished run go on when more steps are asked for than it has; returns what to tell the user.

    The word that it is finished is taken back; its newest checkpoint, that of its last step, is gone on from.
    """
    store = DirectoryStore(folder)
    final = read_final(folder)
    if final is None or final.uid != uid or final.step >= steps:
        return None
    store.delete([layout.FINAL_MANIFEST])
    return f"the run was finished at step {final.step}; going on to step {steps}"


def read_final(folder: Path) -> FinalManifest | None:
    """What came out of the run; None while it is not finished."""
    raw = DirectoryStore(folder).get(layout.FINAL_MANIFEST)
    try:
        return FinalManifest.model_validate_json(raw) if raw is not None else None
    except ValueError:
        return None


def closing_lines(run: RunConfig, code: int, command: str) -> list[str]:
    """The last words of a run: where everything is, or how it goes on.

    Args:
        run: What was run.
        code: The exit code of the start.
        command: The command line.
    """
    folder = Path(run.store.directory or "") / run.path
    final = read_final(folder)
    if code == ExitCode.DONE and final is not None:
        adapter = folder / layout.FINAL / final.adapter
        samples = [f"samples  {folder / layout.FINAL / name}" for name in final.samples]
        return [
            f"adapter  {adapter}",
            *samples,
            "Load it with diffusers:",
            f'    pipe = DiffusionPipeline.from_pretrained("{run.config.model.name_or_path}")',
            f'    pipe.load_lora_weights("{adapter}")',
        ]
    if code in (ExitCode.PREEMPTED, ExitCode.TRANSIENT):
        return [f"Go on with: {command}"]
    return []
