"""The command line. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from lora_operator.local.liveview import View
    from lora_operator.local.prepare import Options

app = typer.Typer(
    help="Train LoRA adapters of diffusion models: as a Kubernetes operator, or on this machine with the same manifest.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_JobFile = Annotated[
    str, typer.Argument(metavar="JOB.yaml", help="A LoRATrainingJob, or an ai-toolkit file; - reads standard input.")
]
_Store = Annotated[
    str, typer.Option(metavar="DIR|s3://BUCKET/PREFIX", help="Where run directories go. The directory is made.")
]
_Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Server of an s3:// store. Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment.",
    ),
]
_Profile = Annotated[
    str | None,
    typer.Option(metavar="PROFILE.yaml", help="A LoRATrainingProfile; left out, one is made up for this machine."),
]


@app.command()
def run(
    job: _JobFile,
    *,
    store: _Store = "runs",
    endpoint: _Endpoint = None,
    profile: _Profile = None,
    preempt_at: Annotated[
        list[int] | None, typer.Option(metavar="STEP", help="Preempt the job on purpose at this step; may be repeated.")
    ] = None,
    write_status: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the job object with its status there, as YAML or .json.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live panel, as in a pipe.")] = False,
) -> None:
    """Run a job on this machine.

    The operator's own reconciler drives local processes: restarts, checkpoints and retention work as in a cluster. Running
    the same job again goes on from its newest checkpoint. Ctrl-C saves and stops. Exit code 0 means: the adapter is there.
    """
    from lora_operator.adapters.clock import SystemClock
    from lora_operator.local import machine, show
    from lora_operator.local.prepare import UserError, prepare
    from lora_operator.local.run import run_job

    options = _options(job, store, endpoint, profile)
    try:
        prepared = prepare(options, machine.environment())
        view = _view(plain=plain)
        try:
            outcome = run_job(prepared, view, SystemClock(), preempt_at=preempt_at or (), write_status=write_status)
        finally:
            view.close()
    except UserError as error:
        _fail(str(error))
    command = "lora-operator " + " ".join(map(shlex.quote, sys.argv[1:]))
    for line in show.closing_lines(outcome, prepared.state, command):
        typer.echo(line, err=outcome.exit_code != 0)
    raise typer.Exit(outcome.exit_code)


@app.command()
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML or JSON; - reads standard input.")],
    *,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory of each GPU that jobs will run on; left out, that of a GPU here."),
    ] = None,
) -> None:
    """Check manifests without a cluster, and tell how much GPU memory jobs need.

    Prints one line for each problem; the exit code is 0 or 1.
    """
    from lora_operator.local.machine import environment, gpu_memory_gib
    from lora_operator.local.validate import validate_files

    report = validate_files(files, gpu_gib=gpu_memory or gpu_memory_gib(environment()))
    for line in report.memory if not report.problems else ():
        typer.echo(line, err=True)
    for note in report.notes:
        typer.echo(note, err=True)
    for problem in report.problems:
        typer.echo(problem)
    manifests = "1 manifest" if report.checked == 1 else f"{report.checked} manifests"
    found = "no problem" if not report.problems else f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}"
    typer.echo(f"{manifests} checked, {found} found", err=True)
    if not report.checked and not report.problems:
        typer.echo("nothing was checked: the files hold no LoRATrainingJob and no LoRATrainingProfile", err=True)
    raise typer.Exit(1 if report.problems or not report.checked else 0)


@app.command()
def convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An ai-toolkit configuration; - reads standard input.")],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="metadata.name; left out, made from the file's config.name.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="NAME", help="Store of the profile, spec.output.store; left out, its default.")
    ] = None,
    process: Annotated[
        int | None, typer.Option(metavar="N", help="Which process of a file with several, counted from 0.")
    ] = None,
) -> None:
    """Turn an ai-toolkit file into a manifest.

    It is written to standard output; comments in it say what works differently here.
    """
    from lora_api.problems import InvalidDocument
    from lora_api.yamlfile import UnreadableError
    from lora_operator.local import machine
    from lora_operator.local.convert import convert_file

    try:
        text = convert_file(file, machine.environment(), process=process, name=name, store=store)
    except UnreadableError as error:
        _fail(str(error))
    except InvalidDocument as error:
        _fail("\n".join(f"{file}: {problem}".replace("by its number", "with --process") for problem in error.problems))
    typer.echo(text, nl=False)


@app.command()
def status(job: _JobFile, store: _Store = "runs", endpoint: _Endpoint = None, profile: _Profile = None) -> None:
    """Show where a local run stands."""
    from lora_operator.local import machine, show
    from lora_operator.local.prepare import UserError, locate

    try:
        key, state = locate(_options(job, store, endpoint, profile), machine.environment())
    except UserError as error:
        _fail(str(error))
    objects = state.load()
    if objects is None:
        _fail(f"{key} has not been run here: {state.folder} holds nothing")
    for line in show.status_lines(objects.job, state):
        typer.echo(line)


@app.command()
def logs(
    job: _JobFile,
    store: _Store = "runs",
    endpoint: _Endpoint = None,
    profile: _Profile = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the run is at work.")] = False,
) -> None:
    """Print the trainer's newest log of a local run."""
    from lora_operator.local import machine, show
    from lora_operator.local.prepare import UserError, locate

    try:
        key, state = locate(_options(job, store, endpoint, profile), machine.environment())
    except UserError as error:
        _fail(str(error))
    newest = state.newest_log()
    if newest is None:
        _fail(f"{key} has no log here: {state.logs} holds none")
    if not follow:
        typer.echo(newest.read_text(errors="replace"), nl=False)
        return
    for text in show.follow(state):
        typer.echo(text, nl=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def serve(context: typer.Context) -> None:
    """Run the operator in a cluster, as the chart does."""
    from lora_operator.serve import main as serve_main

    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(serve_main)  # its options are its own
    program(args=context.args, prog_name="lora-operator serve")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed_version

    typer.echo(installed_version("lora-operator"))


def _options(job: str, store: str, endpoint: str | None, profile: str | None) -> Options:
    from lora_operator.local.prepare import Options

    return Options(job, store, endpoint, profile)


def _view(*, plain: bool) -> View:
    from lora_operator.local.liveview import LiveView, PatientConsole, PlainView

    console = PatientConsole()
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def main() -> None:
    """The program `lora-operator`."""
    app()


if __name__ == "__main__":
    main()
