"""`python -m lora_trainer.launch [torchrun arguments] -m lora_trainer train`: torchrun that tells how it ended.

torchrun turns every failure of its workers into exit code 1 and kills them 30 s after SIGTERM. This launcher runs the
same agent in-process, gives the workers the pod's grace period, and leaves with the code of the worker whose end
explains the others'. One node with one process needs no agent: it is supervised directly, which saves four seconds and
700 MB. Both ways work as PID 1.

Imports nothing heavy before its signal handlers stand.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lora_api.exit_codes import ExitCode, reason_of
from lora_trainer.stopping import PARENT_VARIABLE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_MARGIN_SECONDS = 3  # of the grace period, kept for our own end
_SINGLE = {"--nnodes": {"1", "1:1"}, "--nproc-per-node": {"1"}, "--node-rank": {"0"}, "--max-restarts": {"0"}}
_IRRELEVANT = {
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--master-addr",
    "--master-port",
    "--role",
}
_EXPLAINS = (64, 65, 77, 66, 86, 87)  # these explain the others' ends, in this order
_FOLLOWS = (75, 85, 0)  # these may be consequences of another's end

Word = dict[str, Any]  # lora_api.run.ExitWord as plain JSON: pydantic would double the time this takes to start


@dataclass(frozen=True)
class Outcome:
    """What the launcher saw: exit codes of workers by rank (negative: killed by a signal), and signals of its own."""

    codes: Mapping[int, int]
    signal_name: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the workers and returns the exit code that says how they ended."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for number in SIGNALS:
        signal.signal(number, _leave_before_start)  # as PID 1, unhandled signals would be ignored
    words = Path(tempfile.mkdtemp(prefix="lora-words-"))
    os.environ["LORA_WORD_DIR"] = str(words)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    command = single_process_command(given, os.environ)
    try:
        outcome = Supervisor().run(command) if command else run_torchrun(given)
        word = root_cause(outcome, read_words(words), ranks_started(words))
    finally:
        shutil.rmtree(words, ignore_errors=True)
    _write_termination_log(word)
    if word["code"] == ExitCode.OUT_OF_MEMORY and "LORA_COMMAND" in os.environ and word.get("shrinkHelps", True):
        _begin_smaller(Path(os.environ["LORA_RUN_CONFIG"]), given)
    return int(word["code"])


def _begin_smaller(path: Path, arguments: Sequence[str]) -> None:
    """A run of the command line, which no operator makes smaller: begins it again, if that may help."""
    from lora_trainer.commandline import smaller

    how = smaller.shrink(path)
    _say(how or smaller.ADVICE)
    if how is not None:
        smaller.begin_again(["-m", "lora_trainer.launch", *arguments])


def single_process_command(arguments: Sequence[str], variables: Mapping[str, str]) -> list[str] | None:
    """The worker's command line when one process on one node is asked for; None when torchrun's agent is needed.

    Args:
        arguments: torchrun's arguments, `-m`, the module and its arguments.
        variables: The environment; torchrun takes `PET_NNODES` and the like as defaults.
    """
    asked = {name: variables.get("PET_" + name[2:].replace("-", "_").upper()) for name in _SINGLE}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        name = name.replace("_", "-")
        if name in ("-m", "--module"):
            single = all(value is None or value in _SINGLE[name] for name, value in asked.items())
            return [sys.executable, "-u", "-m", *rest] if single and rest else None
        if name == "--standalone":
            continue
        if name not in _SINGLE and name not in _IRRELEVANT:
            return None
        if not equals:
            value = rest.pop(0) if rest else ""
        if name in _SINGLE:
            asked[name] = value
    return None


class Supervisor:
    """Runs one worker directly: passes signals on, kills after the grace period, reaps orphans as PID 1 has to."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None

    def run(self, command: list[str]) -> Outcome:
        """Runs the command to its end."""
        for number in SIGNALS:
            signal.signal(number, self._receive)
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self._worker = subprocess.Popen(command, env=environment, start_new_session=True)
        if self._signal is not None:  # it came while the worker was being started
            self._pass_on(self._signal)
        code = None
        while code is None:
            pid, status = os.waitpid(-1, 0)
            if pid == self._worker.pid:
                code = self._worker.returncode = os.waitstatus_to_exitcode(status)
        signal.alarm(0)
        name = signal.Signals(self._signal).name if self._signal is not None else None
        return Outcome({0: code}, name)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        if self._worker is not None and self._worker.returncode is None:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        assert self._worker is not None
        self._worker.send_signal(number)
        signal.signal(signal.SIGALRM, self._kill)
        signal.alarm(shutdown_seconds(os.environ))

    def _kill(self, _number: int, _frame: FrameType | None) -> None:
        assert self._worker is not None
        self._worker.kill()


def run_torchrun(arguments: list[str]) -> Outcome:
    """Runs torchrun's agent in this process to its end; its own handlers take over once it starts workers."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(shutdown_seconds(os.environ))
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return Outcome({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return Outcome({}, error.sigval.name)
    except (DistError, RendezvousError) as error:
        _say(f"the process group could not be formed: {error}")
        return Outcome({0: int(ExitCode.TRANSIENT)})
    return Outcome({})


def root_cause(outcome: Outcome, words: Mapping[int, Word], started: frozenset[int] = frozenset()) -> Word:
    """The word that explains why the workers ended.

    A worker that hears of another's death in a collective ends with 75, and one that the agent tells to stop with 85:
    those only count when no other word explains them.

    Args:
        outcome: What the launcher saw.
        words: What the workers left, by rank.
        started: Ranks whose signal handlers stood.
    """
    ranks = sorted({*outcome.codes, *words, *(started if outcome.signal_name else ())})
    candidates = [_word_of_rank(rank, outcome, words.get(rank), started) for rank in ranks]
    step = max((int(word.get("step", 0)) for word in words.values()), default=0)
    if not candidates and outcome.signal_name:
        candidates = [_word(int(ExitCode.PREEMPTED), f"stopped by {outcome.signal_name} before the workers began")]
    cause = min(candidates, key=lambda word: _importance(int(word["code"])), default=_word(0, "done"))
    return {**cause, "step": step}


def _word_of_rank(rank: int, outcome: Outcome, word: Word | None, started: frozenset[int]) -> Word:
    code = outcome.codes.get(rank)
    if word is not None and code in (None, word["code"]):
        return word
    if code == -signal.SIGTERM or (code is None and rank not in started):
        return _word(int(ExitCode.PREEMPTED), f"rank {rank} was stopped before it began")
    if code is None or (code == -signal.SIGKILL and outcome.signal_name):
        seconds = shutdown_seconds(os.environ)
        return _word(
            128 + signal.SIGKILL, f"rank {rank} did not save within {seconds} s of {outcome.signal_name} and was killed"
        )
    if code < 0:
        hint = "; out of host memory is the usual reason" if code == -signal.SIGKILL else ""
        return _word(128 - code, f"rank {rank} was killed by {signal.Signals(-code).name}{hint}")
    return _word(code, f"rank {rank} ended with exit code {code}; see its log")


def _importance(code: int) -> int:
    if code in _EXPLAINS:
        return _EXPLAINS.index(code)
    return 100 + _FOLLOWS.index(code) if code in _FOLLOWS else 50


def _word(code: int, message: str) -> Word:
    return {"code": code, "reason": reason_of(code), "message": message, "step": 0}


def read_words(folder: Path) -> dict[int, Word]:
    """The exit words that workers left, by rank; one that can't be read counts as none."""
    words: dict[int, Word] = {}
    for file in folder.glob("rank-*.json"):
        try:
            word = json.loads(file.read_text())
            words[int(file.stem.removeprefix("rank-"))] = {**word, "code": int(word["code"])}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return words


def ranks_started(folder: Path) -> frozenset[int]:
    """Ranks that left their mark once their signal handlers stood."""
    return frozenset(int(file.stem.removeprefix("rank-")) for file in folder.glob("rank-*.started"))


def shutdown_seconds(variables: Mapping[str, str]) -> int:
    """Whole seconds that workers get between our SIGTERM and SIGKILL, from the pod's grace period."""
    return max(1, int(float(variables.get("LORA_GRACE_SECONDS", "30"))) - _MARGIN_SECONDS)


def _leave_before_start(number: int, _frame: FrameType | None) -> NoReturn:
    """Nothing runs yet, so nothing has to be saved."""
    _write_termination_log(
        _word(int(ExitCode.PREEMPTED), f"stopped by {signal.Signals(number).name} before the workers began")
    )
    os._exit(int(ExitCode.PREEMPTED))


def _write_termination_log(word: Word) -> None:
    path = Path(os.environ.get("LORA_TERMINATION_LOG") or "/dev/termination-log")
    if "LORA_TERMINATION_LOG" not in os.environ and not path.is_file():
        return
    try:
        path.write_text(json.dumps(word) + "\n")
    except OSError as error:
        _say(f"{path}: the exit word can't be written: {error.strerror}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
