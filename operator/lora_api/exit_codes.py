"""Exit codes of the trainer, and what each means to the operator."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """A reserved exit code of the trainer."""

    DONE = 0
    CONFIGURATION = 64
    DATA = 65
    CHECKPOINT_INTEGRITY = 66
    TRANSIENT = 75
    CREDENTIALS = 77
    PREEMPTED = 85
    OUT_OF_MEMORY = 86
    NOT_FINITE = 87


NEVER_RETRIED = frozenset({ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.CREDENTIALS, ExitCode.CHECKPOINT_INTEGRITY})
"""Trying again as it is can't help: a person has to change something first."""

_REASONS = {
    ExitCode.DONE: "Completed",
    ExitCode.CONFIGURATION: "InvalidConfiguration",
    ExitCode.DATA: "InvalidData",
    ExitCode.CHECKPOINT_INTEGRITY: "NoUsableCheckpoint",
    ExitCode.TRANSIENT: "TransientError",
    ExitCode.CREDENTIALS: "CredentialsRefused",
    ExitCode.PREEMPTED: "Preempted",
    ExitCode.OUT_OF_MEMORY: "OutOfDeviceMemory",
    ExitCode.NOT_FINITE: "LossNotFinite",
}


def reason_of(code: int) -> str:
    """The CamelCase reason that conditions and events use for an exit code; `Error` for any other."""
    return _REASONS[ExitCode(code)] if code in set(ExitCode) else "Error"
