"""From a command line to a trained adapter: decide, say what was decided, hand over to the trainer."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lora_api.config import TrainerConfig
from lora_api.exit_codes import ExitCode
from lora_api.problems import parse
from lora_api.run import RunConfig
from lora_trainer.commandline import epochs, flags, rundir
from lora_trainer.commandline.assemble import Draft, draft
from lora_trainer.commandline.detect import arch_of
from lora_trainer.commandline.refusal import Refusal
from lora_trainer.commandline.smaller import begin_again
from lora_trainer.commandline.sources import Source, read_source, with_folders_of

log = logging.getLogger("lora_trainer")


@dataclass(frozen=True)
class Plan:
    """What a command line asks for."""

    run: RunConfig
    folder: Path  # the run directory
    notes: tuple[str, ...]  # what to say before it begins
    processes: int = 1


def plan_run(given: argparse.Namespace, variables: Mapping[str, str]) -> Plan:
    """Decides everything; reads files, writes none.

    Raises:
        Refusal: For everything that is wrong with flags, file or folders.
    """
    source = read_source(given.config, given.process, variables) if given.config else None
    if given.process is not None and source is None:
        raise Refusal("--process chooses from an ai-toolkit file; give it with --config")
    notes = list(source.notes) if source else []
    folder = _output_dir(given, source)
    found = draft(given, source)
    _require(found)
    found.raw = with_folders_of(found.raw, Path.cwd())  # the same command from another folder is the same run
    notes += _detect_arch(found)
    if given.num_epochs is not None:
        epochs.make_room(found)
    config = found.check()
    _refuse_missing_folders(config, found)
    if given.num_epochs is not None:
        count = _whole_number(given.num_epochs, "--num_epochs")
        steps, words = epochs.steps_of(count, epochs.count_samples(config.datasets), config, given.nproc_per_node)
        found.put("train.steps", steps, "--num_epochs")
        config = found.check()
        notes.append(words)
    document = rundir.document_of(folder, rundir.uid_of(folder), config.model_dump(mode="json"), given.nproc_per_node)
    document["shrunk"] = rundir.shrunk_before(folder, config.train)
    run = parse(RunConfig, document)
    flag_of = {path: f"--{name}" for name, path in flags.FIELDS.items()}
    rundir.refuse_other_settings(folder, run, flag_of)
    return Plan(run, folder, tuple(notes), given.nproc_per_node)


def _output_dir(given: argparse.Namespace, source: Source | None) -> Path:
    name = given.output_dir or (source.output_dir if source else None)
    if not name:
        raise Refusal("--output_dir is missing: the folder for checkpoints, samples and the adapter")
    if given.nproc_per_node < 1:
        raise Refusal(f"--nproc_per_node: {given.nproc_per_node} is below the minimum 1")
    return Path(name).expanduser().absolute()


def _require(found: Draft) -> None:
    model = found.raw.get("model")
    if not isinstance(model, dict) or not model.get("name_or_path"):
        raise Refusal(
            "--base_model is missing: the folder of the base model, a diffusers pipeline with model_index.json"
        )
    if not found.raw.get("datasets"):
        raise Refusal("--train_data is missing: a folder of pictures with captions")


def _detect_arch(found: Draft) -> list[str]:
    """Fills in the family where nobody named it."""
    model = found.raw["model"]
    place = str(model["name_or_path"])
    if model.get("arch"):
        return []
    if "://" in place:
        raise Refusal(f"--arch is needed: {place} is not a local folder to look into")
    model["arch"] = arch_of(Path(place).expanduser())
    return [f"arch {model['arch']}, seen from {place}/model_index.json"]


def _refuse_missing_folders(config: TrainerConfig, found: Draft) -> None:
    """Said now rather than after torch was imported."""
    places = [("model.name_or_path", config.model.name_or_path, ExitCode.CONFIGURATION)]
    places += [
        (f"datasets[{n}].folder_path", each.folder_path, ExitCode.DATA) for n, each in enumerate(config.datasets)
    ]
    places += [
        (f"datasets[{n}].mask_path", each.mask_path, ExitCode.DATA)
        for n, each in enumerate(config.datasets)
        if each.mask_path
    ]
    for path, place, code in places:
        flag = found.origins.get(path, path)
        if place.startswith("s3://"):
            raise Refusal(
                f"{flag}: {place}: stores are reached with a manifest and `lora-operator run`; give a local folder"
            )
        if "://" not in place and not Path(place).expanduser().exists():
            hint = "; models are not downloaded here" if code == ExitCode.CONFIGURATION else ""
            raise Refusal(f"{flag}: the folder {place} does not exist{hint}", code)


def _whole_number(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise Refusal(f"{flag}: found {text!r}, expected a whole number of at least 1")
    return int(text)


def begin(plan: Plan, command: str) -> Path:
    """Writes what will be run, and the environment of the workers; returns the run configuration's file.

    Args:
        plan: What to run.
        command: The command line that goes on with it.
    """
    again = rundir.reopen_if_longer(plan.folder, plan.run.uid, plan.run.config.train.steps)
    if again:
        log.info("%s", again)
    path = rundir.write_run_config(plan.folder, plan.run)
    os.environ["LORA_RUN_CONFIG"] = str(path)
    os.environ["LORA_RETENTION"] = "trainer"
    os.environ["LORA_COMMAND"] = command
    return path


def relaunch(processes: int) -> NoReturn:
    """Becomes the launcher, which starts that many workers; they find the run configuration in the environment."""
    launcher = ["-m", "lora_trainer.launch", "--standalone", f"--nproc-per-node={processes}"]
    begin_again([*launcher, "-m", "lora_trainer", "train"])


def prepare(arguments: Sequence[str], program: str) -> Path:
    """The run configuration that a command line asks for; with several processes this becomes the launcher.

    Args:
        arguments: Without the program's name.
        program: As the user called it.

    Raises:
        Refusal: When it can't be run.
        SystemExit: After `--help`.
    """
    given = flags.parse(arguments, program)
    if given.run_config is not None:
        others = [name for name, value in vars(given).items() if value not in (None, [], 1) and name != "run_config"]
        if others:
            raise Refusal(f"--run_config says everything; remove --{', --'.join(others)}")
        return Path(given.run_config)
    plan = plan_run(given, os.environ)
    for note in plan.notes:
        log.info("%s", note)
    log.info("output goes to %s", plan.folder)
    path = begin(plan, shlex.join([*program.split(" "), *arguments]))
    if plan.processes > 1:
        sys.stderr.flush()
        relaunch(plan.processes)
    return path
