"""What the command line refuses before anything starts."""

from __future__ import annotations

from lora_api.exit_codes import ExitCode


class Refusal(ValueError):  # noqa: N818 - reads as what it is wherever it is caught
    """A sentence for the user, and the exit code that goes with it."""

    def __init__(self, message: str, code: ExitCode = ExitCode.CONFIGURATION) -> None:
        super().__init__(message)
        self.code = code
