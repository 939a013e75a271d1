"""`lora-trainer`: the trainer's command line. Imports torch only in commands that need it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lora_api.exit_codes import ExitCode
from lora_trainer.stopping import STOP, Stopped

app = typer.Typer(
    help="Trains adapters of diffusion models: LoRA, DoRA, LoHa, LoKr, or all weights. Usually started by the LoRA Operator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _callback() -> None:
    """Trains adapters of diffusion models: LoRA, DoRA, LoHa, LoKr, or all weights. Usually started by the LoRA Operator."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(context: typer.Context) -> None:
    """Train an adapter to its end, going on from its newest checkpoint. `train --help` lists the flags."""
    run_training(context.args, "lora-trainer train")


def run_training(arguments: Sequence[str], program: str) -> NoReturn:
    """Trains as the flags say, or, without any, as the run configuration in `LORA_RUN_CONFIG` says; ends the process.

    Args:
        arguments: Without the program's name.
        program: As the user called it.
    """
    from lora_trainer.environment import Environment

    environment = Environment.read(os.environ)
    _log_to_stderr(environment.rank, environment.world_size)
    if not arguments and "LORA_RUN_CONFIG" in os.environ:
        _leave(train_file(Path(os.environ["LORA_RUN_CONFIG"])))
    from lora_trainer.commandline.command import prepare
    from lora_trainer.commandline.refusal import Refusal

    try:
        path = prepare(arguments, program)
    except Refusal as error:
        sys.stderr.write(f"{error}\n`{program} --help` lists all flags\n")
        sys.exit(int(error.code))  # nothing heavy runs yet
    except Stopped:
        sys.exit(85)
    _leave(train_file(path))


def train_file(path: Path) -> int:
    """Runs one start of a run configuration; returns the exit code, after the last words to a user who began it.

    Such a user's run that is out of memory is made smaller and begun again: this process then becomes another one.
    """
    from lora_trainer.environment import Environment
    from lora_trainer.train import read_run_config
    from lora_trainer.train import train as run_start

    environment = Environment.read(os.environ)
    code = run_start(path, environment, STOP)
    if environment.command is not None and environment.leads:
        from lora_trainer.commandline.rundir import closing_lines

        if (
            code == ExitCode.OUT_OF_MEMORY and environment.word_folder is None
        ):  # else the launcher does it for all ranks
            _begin_smaller(path)
        for line in closing_lines(read_run_config(path), code, environment.command):
            sys.stderr.write(line + "\n")
    return code


def _begin_smaller(path: Path) -> None:
    """Begins a smaller run, if that may help."""
    from lora_trainer.commandline import smaller

    if not smaller.shrinking_helps(path):
        return
    how = smaller.shrink(path)
    sys.stderr.write(f"{how or smaller.ADVICE}\n")
    if how is not None:
        smaller.begin_again(["-m", "lora_trainer", "train"])


@app.command("make-tiny")
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    arch: Annotated[str, typer.Option(help="Model family, a value of model.arch such as zimage or wan21.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny base model of a few megabytes with random weights: real classes, real files, for trying things out."""
    _silence_libraries()
    from lora_trainer.tiny import make_tiny as build

    try:
        build(arch, out, seed)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(64) from error
    sys.stdout.write(f"{out}\n")


def main() -> None:
    """Entry point of `lora-trainer`."""
    STOP.install()
    app()


def _log_to_stderr(rank: int, world_size: int) -> None:
    where = f"[rank {rank}] " if world_size > 1 else ""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {where}%(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    _silence_libraries()


def _silence_libraries() -> None:
    """What libraries say that is nobody's concern who trains."""
    for noisy in ("httpx", "urllib3", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns of kernels that only its own layers would use


def _leave(code: int) -> NoReturn:
    """Ends the process now: native threads of a broken process group may never end by themselves."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
