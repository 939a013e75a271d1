"""The environment variables that the launcher, the operator and torchrun set, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True)
class Environment:
    """Where this process stands in its group, and where things lie on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    credentials_folder: Path | None = None  # mounted Secret with accessKey and secretKey
    cache_folder: Path = Path("~/.cache/lora-trainer")
    termination_log: Path | None = None
    word_folder: Path | None = None  # where each rank leaves its word for the launcher
    heartbeat_seconds: float = 2.0
    metrics_port: int = 0  # 0: no /metrics
    grace_seconds: float = 30.0  # between SIGTERM and SIGKILL
    removes_checkpoints: bool = False  # no operator does
    command: str | None = None  # the command line that goes on with the run, where a person began it

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only one that writes to the run directory."""
        return self.rank == 0

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """The environment of a process with these variables."""

        def path(name: str) -> Path | None:
            return Path(variables[name]) if variables.get(name) else None

        cache_root = Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME", "/tmp")) / ".cache")  # noqa: S108 - last resort
        return cls(
            rank=int(variables.get("RANK", "0")),
            world_size=int(variables.get("WORLD_SIZE", "1")),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
            credentials_folder=path("LORA_CREDENTIALS_DIR"),
            cache_folder=path("LORA_CACHE_DIR") or cache_root / "lora-trainer",
            termination_log=path("LORA_TERMINATION_LOG") or _writable(DEFAULT_TERMINATION_LOG),
            word_folder=path("LORA_WORD_DIR"),
            heartbeat_seconds=float(variables.get("LORA_HEARTBEAT_SECONDS", "2")),
            metrics_port=int(variables.get("LORA_METRICS_PORT") or "0"),
            grace_seconds=float(variables.get("LORA_GRACE_SECONDS", "30")),
            removes_checkpoints=variables.get("LORA_RETENTION") == "trainer",
            command=variables.get("LORA_COMMAND"),
        )


def _writable(name: str) -> Path | None:
    return Path(name) if Path(name).is_file() and os.access(name, os.W_OK) else None
