"""What this machine offers a local run: GPUs, folders, credentials. Asked without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lora_api.stores import ACCESS_KEY, SECRET_KEY, Credentials

_NVIDIA_SMI_SECONDS = 10
_MIB_IN_A_GIB = 1024


def find_gpus(variables: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """CUDA device identifiers; `CUDA_VISIBLE_DEVICES` limits them, as it does for every program."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    there = _gpus_present(devices)
    if visible is None or not there:
        return there
    named = [name.strip() for name in visible.split(",") if name.strip()]
    if "-1" in named:
        named = named[: named.index("-1")]
    return tuple(named)


def gpu_memory_gib(variables: Mapping[str, str], devices: Path = Path("/dev")) -> float | None:
    """Memory of the smallest GPU here; None where there is none, or it doesn't say."""
    if not find_gpus(variables, devices) or not shutil.which("nvidia-smi"):
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True).stdout
        return min(float(line) for line in said.splitlines() if line.strip()) / _MIB_IN_A_GIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _gpus_present(devices: Path) -> tuple[str, ...]:
    if not (devices / "nvidiactl").exists() and not list(devices.glob("nvidia[0-9]*")):
        return ()
    if shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run(
                ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            listing = ""
        count = sum(line.startswith("GPU ") for line in listing.splitlines())
    else:
        count = len(list(devices.glob("nvidia[0-9]*")))
    return tuple(str(number) for number in range(count))


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Where encoded pictures are kept from run to run: `$XDG_CACHE_HOME/lora-operator`."""
    return _xdg(variables, "XDG_CACHE_HOME", ".cache")


def state_root(variables: Mapping[str, str]) -> Path:
    """Where runs into an S3 store are remembered: `$XDG_STATE_HOME/lora-operator`."""
    return _xdg(variables, "XDG_STATE_HOME", ".local/state")


def credentials_from(variables: Mapping[str, str]) -> Credentials | None:
    """S3 credentials, from the names that the aws and the minio tools read."""
    pairs = (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"),
        ("MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"),
    )
    for access, secret in pairs:
        if variables.get(access) and variables.get(secret):
            return Credentials(variables[access], variables[secret])
    return None


def secret_data(credentials: Credentials) -> dict[str, str]:
    """The data of the Secret that a cluster would hold."""
    return {ACCESS_KEY: credentials.access_key, SECRET_KEY: credentials.secret_key}


def environment() -> Mapping[str, str]:
    """This process' environment."""
    return os.environ


def _xdg(variables: Mapping[str, str], name: str, fallback: str) -> Path:
    root = variables.get(name)
    return (Path(root) if root else Path.home() / fallback) / "lora-operator"
