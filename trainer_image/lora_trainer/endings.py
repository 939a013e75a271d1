"""How a start ended, in the words of the contract: one JSON line for the operator, one sentence for people."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lora_api.exit_codes import ExitCode, reason_of
from lora_api.problems import InvalidDocument
from lora_api.run import ExitWord, Stage
from lora_api.store import StoreCredentialsError, StoreError, StoreMissingError
from lora_trainer.environment import Environment
from lora_trainer.errors import (
    CheckpointIntegrityError,
    ConfigurationError,
    DataError,
    FencedError,
    NotFiniteError,
    TransientError,
)
from lora_trainer.out_of_memory import advice, deepest, doing, is_out_of_memory
from lora_trainer.stopping import Stopped

PLAIN_FAILURE = 1
_MAX_MESSAGE = 2000  # the kubelet cuts termination messages at 4096 bytes

_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (Stopped, ExitCode.PREEMPTED),
    (ConfigurationError, ExitCode.CONFIGURATION),
    (InvalidDocument, ExitCode.CONFIGURATION),
    (DataError, ExitCode.DATA),
    (CheckpointIntegrityError, ExitCode.CHECKPOINT_INTEGRITY),
    (NotFiniteError, ExitCode.NOT_FINITE),
    (FencedError, ExitCode.TRANSIENT),
    (TransientError, ExitCode.TRANSIENT),
    (StoreCredentialsError, ExitCode.CREDENTIALS),
    (StoreMissingError, ExitCode.CONFIGURATION),
    (StoreError, ExitCode.TRANSIENT),
)


def code_of(error: BaseException) -> int:
    """The exit code for an error that ended a start; 1 for anything unforeseen."""
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, _loaded("lora_trainer.families.folder", "ModelError")):
        return ExitCode.CONFIGURATION
    if is_collective_error(error):
        return ExitCode.TRANSIENT
    return PLAIN_FAILURE


def is_collective_error(error: BaseException) -> bool:
    """Whether another rank or the network between ranks is at fault."""
    if isinstance(error, _loaded("torch.distributed", "DistError")):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "Connection closed by peer" in text)


def word_of(error: BaseException, step: int, stage: Stage = "Training", doing: str = "") -> ExitWord:
    """The word for an error.

    Args:
        error: What ended the start.
        step: Updates done and committed.
        stage: In which it ended.
        doing: What was being done, where that explains the error.
    """
    code = code_of(error)
    message = _out_of_memory(error, stage, doing) if code == ExitCode.OUT_OF_MEMORY else _sentence(error, code, step)
    return ExitWord(
        code=int(code),
        reason=reason_of(code),
        message=message[:_MAX_MESSAGE],
        step=step,
        shrink_helps=stage == "Training",
    )


def done_word(step: int, message: str) -> ExitWord:
    """The word for a start that finished its work."""
    return ExitWord(code=int(ExitCode.DONE), reason=reason_of(ExitCode.DONE), message=message, step=step)


def write_word(word: ExitWord, environment: Environment) -> None:
    """Leaves the word for the launcher and, unless that will do it, in the termination log. Never raises."""
    line = word.model_dump_json()
    if environment.word_folder is not None:
        _write(environment.word_folder / f"rank-{environment.rank}.json", line)
    if environment.termination_log is not None and environment.local_rank == 0:
        _write(environment.termination_log, line)


def _write(path: Path, line: str) -> None:
    try:
        path.write_text(line + "\n")
    except OSError as error:
        sys.stderr.write(f"{path}: the exit word can't be written: {error.strerror}\n")


def _sentence(error: BaseException, code: int, step: int) -> str:
    if isinstance(error, Stopped):
        saved = f"the checkpoint of step {step} is committed" if step else "nothing was to be saved"
        return f"stopped by {next(iter(error.args), None) or 'a signal'}; {saved}"
    if code == ExitCode.TRANSIENT and is_collective_error(error):
        return f"another rank or the network between ranks failed: {_first_line(error)}"
    if code == PLAIN_FAILURE:
        return f"{type(error).__name__}: {_first_line(error)}"
    return str(error)


def _out_of_memory(error: BaseException, stage: Stage, detail: str) -> str:
    said = _first_line(deepest(error)).removesuffix(".")
    return f"out of device memory while {doing(stage, detail)}: {said}; {advice(stage, detail)}"


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", line).split(". This is typically")[0]


def _loaded(module: str, name: str) -> tuple[type[BaseException], ...]:
    """A class of a module that may not have been imported yet; an error of it then can't exist."""
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()
