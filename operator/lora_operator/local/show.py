"""What is said at the end of a run, and by `status` and `logs`: facts in, lines of text out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from lora_api.job import ConditionType, JobStatus, Phase
from lora_operator.adapters.local_state import LocalState
from lora_operator.core.conditions import condition_of
from lora_operator.core.read import read_status
from lora_operator.core.times import format_bytes, format_duration
from lora_operator.core.views import Manifest
from lora_operator.local.liveview import facts_of, restarts_text
from lora_operator.local.run import Outcome

_LAST_LINES = 15
_TAIL_BYTES = 1 << 16
_FOLLOW_SECONDS = 0.3
_EXPERTS = ("_high_noise", "_low_noise")


def closing_lines(outcome: Outcome, state: LocalState, command: str) -> list[str]:
    """The last words of `lora-operator run`.

    Args:
        outcome: How it ended.
        state: Where the logs are.
        command: The command line that goes on with the run.
    """
    if outcome.succeeded:
        return _success_lines(outcome, state)
    if outcome.signal is not None and outcome.status.phase is Phase.SUSPENDED:
        newest = outcome.status.checkpoints.newest_step
        saved = f"saved at step {newest}" if newest is not None else "no checkpoint was committed yet"
        return [f"Stopped; {saved}.", f"Go on with: {command}"]
    return _failure_lines(outcome, state)


def status_lines(job: Manifest, state: LocalState) -> list[str]:
    """`lora-operator status`: the job's state, and what it said last."""
    status = read_status(job)
    metadata = job["metadata"]
    phase = status.phase.value
    if status.phase in (Phase.RUNNING, Phase.PENDING, Phase.QUEUED, Phase.INTERRUPTED) and not state.is_busy():
        phase += " when its lora-operator ended; run it again to go on"
    lines = [f"{metadata['namespace']}/{metadata['name']}: {phase}"]
    progress = status.progress
    if progress is not None:
        figures = [f"{progress.step}/{progress.steps} ({progress.percent})"]
        figures += [f"loss {progress.loss}"] if progress.loss else []
        figures += [f"ETA {progress.eta}"] if progress.eta and progress.eta_seconds else []
        lines.append(f"  {'step':<12} {'  '.join(figures)}")
    lines += [f"  {name:<12} {text}" for name, text in facts_of(status)]
    why = _why(status)
    lines += [f"  {'reason':<12} {why}"] if why else []
    log = state.newest_log()
    lines += [f"  {'log':<12} {log}"] if log else []
    lines += [f"  {entry['time']}  {entry['reason']}: {entry['message']}" for entry in state.events()[-8:]]
    return lines


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a log; progress bars that were drawn over each other count as one line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    return [line for line in lines if line.strip()][-count:]


def follow(state: LocalState) -> Iterator[str]:
    """The newest log, and the next one when a restart begins it, until no run is at work any more."""
    path, position = state.newest_log(), 0
    while True:
        busy = state.is_busy()
        if path is not None:
            with path.open("rb") as file:
                file.seek(position)
                text = file.read()
            position += len(text)
            yield text.decode(errors="replace")
        newest = state.newest_log()
        if newest != path:
            path, position = newest, 0
        elif not busy:
            return
        else:
            time.sleep(_FOLLOW_SECONDS)


def diffusers_lines(base_model: str, adapter: str) -> list[str]:
    """How the result is loaded: an adapter with the files of its further kinds and experts, or a whole denoiser.

    Nothing for layouts that diffusers was not asked for.
    """
    folder, _, name = adapter.rpartition("/")
    if name == "diffusion_pytorch_model.safetensors":
        return [
            "from diffusers import AutoModel, DiffusionPipeline",
            f'denoiser = AutoModel.from_pretrained("{folder}")',
            f'pipe = DiffusionPipeline.from_pretrained("{base_model}", {Path(folder).name}=denoiser)',
        ]
    experts = [f"adapter{ending}.safetensors" for ending in _EXPERTS]
    if name not in ("adapter.safetensors", *experts):
        return []
    lines = [
        "from diffusers import DiffusionPipeline",
        f'pipe = DiffusionPipeline.from_pretrained("{base_model}")',
    ]
    endings = _EXPERTS if name in experts else ("",)
    candidates = [f"adapter{ending}{kind}" for ending in endings for kind in ("", ".dora", ".lokr")]
    found = {each: f"{folder}/{each}.safetensors" for each in candidates}
    files = {_short(each): file for each, file in found.items() if file == adapter or Path(file).is_file()}
    if len(files) == 1:
        return [*lines, f'pipe.load_lora_weights("{adapter}"{_into(adapter)})']
    lines += [f'pipe.load_lora_weights("{file}", adapter_name="{short}"{_into(file)})' for short, file in files.items()]
    return [*lines, f"pipe.set_adapters({list(files)})"]


def _short(name: str) -> str:
    """A name inside the pipeline for an adapter file: `first`, `lokr`, `high_noise`, `high_noise_lokr`."""
    return name.removeprefix("adapter").strip("._").replace(".", "_") or "first"


def _into(file: str) -> str:
    """What the loader is told for the second of two experts."""
    return ", load_into_transformer_2=True" if f"/adapter{_EXPERTS[1]}." in file else ""


def _success_lines(outcome: Outcome, state: LocalState) -> list[str]:
    status, metadata = outcome.status, outcome.job["metadata"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    steps = status.progress.step if status.progress else 0
    if outcome.was_over:
        lines = [f"{name} has already succeeded ({steps} steps). Begin another run with a new metadata.name."]
    else:
        restarts = f", restarts: {restarts_text(status)}" if status.restarts.total else ""
        lines = [f"{name} succeeded in {format_duration(outcome.seconds)}: {steps} steps{restarts}."]
    output = status.output
    size = f" ({format_bytes(output.size_bytes)} in all)" if output.size_bytes else ""
    facts = [("adapter", f"{output.adapter}{size}")]
    facts += [("samples", ", ".join(output.samples))] if output.samples else []
    facts += [("checkpoints", status.checkpoints.location)] if status.checkpoints.count else []
    log = state.newest_log()
    facts += [("log", str(log))] if log else []
    lines += [f"  {name:<12} {text}" for name, text in facts]
    model = outcome.job["spec"]["config"]["model"]["name_or_path"]
    how = diffusers_lines(model, output.adapter or "")
    return [*lines, "Load it with diffusers:", *(f"    {line}" for line in how)] if how else lines


def _failure_lines(outcome: Outcome, state: LocalState) -> list[str]:
    status, metadata = outcome.status, outcome.job["metadata"]
    lines = [
        f"{metadata['namespace']}/{metadata['name']}: {status.phase.value}: {_why(status) or 'no reason was given'}"
    ]
    log = state.newest_log()
    if log is not None and status.attempt:
        lines += [f"The last lines of {log}:", *(f"    {line}" for line in tail(log, _LAST_LINES))]
    if status.checkpoints.newest_step is not None:
        lines.append(f"Running it again goes on from the checkpoint of step {status.checkpoints.newest_step}.")
    return lines


def _why(status: JobStatus) -> str:
    for kind in (ConditionType.FAILED, ConditionType.INTERRUPTED):
        condition = condition_of(status, kind)
        if condition is not None and condition.status == "True":
            return f"{condition.reason}: {condition.message}"
    accepted = condition_of(status, ConditionType.ACCEPTED)
    return accepted.message if accepted is not None and accepted.status == "False" else ""
