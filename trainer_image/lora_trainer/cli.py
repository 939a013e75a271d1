"""`lora-trainer`: the trainer's command line. Imports torch only in commands that need it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lora_trainer.stopping import STOP

app = typer.Typer(
    help="Trains LoRA and LoKr adapters of diffusion models. Usually started by the LoRA Operator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _callback() -> None:
    """Trains LoRA and LoKr adapters of diffusion models. Usually started by the LoRA Operator."""


@app.command()
def train(
    run_config: Annotated[
        Path, typer.Option(envvar="LORA_RUN_CONFIG", help="JSON file with what to train and where to write.")
    ],
) -> None:
    """Train one job to its end, going on from its newest checkpoint.

    Exit codes: 0 done, 64 configuration, 65 data, 66 no usable checkpoint, 75 try again, 77 credentials, 85 stopped and
    saved, 86 out of device memory, 87 loss not finite.
    """
    from lora_trainer.environment import Environment
    from lora_trainer.train import train as run_start

    environment = Environment.read(os.environ)
    _log_to_stderr(environment.rank, environment.world_size)
    _leave(run_start(run_config, environment, STOP))


@app.command("make-tiny")
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    arch: Annotated[
        str, typer.Option(help="Model family: flux1, flux2_klein_4b, flux2_klein_9b, sd15, sdxl or zimage.")
    ],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny base model of a few megabytes with random weights: real classes, real files, for trying things out."""
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
    for noisy in ("httpx", "urllib3", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _leave(code: int) -> NoReturn:
    """Ends the process now: native threads of a broken process group may never end by themselves."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
