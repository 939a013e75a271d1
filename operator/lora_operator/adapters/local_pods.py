"""The kubelet of the local engine: a pod's volumes become folders, its command a process, its end a termination message."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_operator.adapters import local_shim
from lora_operator.adapters.local_jobs import container_of, index_of
from lora_operator.core.views import Manifest

RECORD = "process.json"  # in a pod's folder: its processes, see local_shim
TERMINATION_LOG = "termination-log"  # in a pod's folder
CACHE_VARIABLE = "LORA_CACHE_DIR"
_TERMINATION_PATH = "/dev/termination-log"  # Kubernetes' default
_MESSAGE_LIMIT_BYTES = 4096  # the kubelet's
_FALLBACK_LIMIT_BYTES = 2048  # of FallbackToLogsOnError
_NOT_REDIRECTED = ("/dev/shm",)  # noqa: S108 - the machine's own serves as well
_SECRET_VARIABLES = re.compile(r"^(AWS|MINIO)_.*(KEY|TOKEN|PASSWORD|USER)")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_ADDRESS = re.compile(r"^(--master[-_]addr=).*$")
_PORT = re.compile(r"^(--master[-_]port=).*$")
_PROGRAMS = {"python3", "python", "python3.11", "python3.12", "python3.13"}


@dataclass(frozen=True)
class Machine:
    """What one machine gives to all pods of an attempt."""

    cache: Path
    configs: dict[str, dict[str, str]] = field(default_factory=dict)  # ConfigMaps: name -> data
    secrets: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    gpus: tuple[str, ...] = ()
    port: int = 29500  # of the rendezvous


@dataclass(frozen=True)
class Launch:
    """A command line, ready to be run, and where its words will be."""

    command: list[str]
    env: dict[str, str] = field(repr=False)
    termination_log: Path
    falls_back_to_log: bool


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expand(text: str, values: dict[str, str]) -> str:
    """Kubernetes' `$(NAME)`: unknown names stay as they are, `$$` is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "$"
        return values.get(name, str(match.group(0)))

    return _REFERENCE.sub(replace, text)


def prepare(pod: Manifest, folder: Path, machine: Machine) -> Launch:
    """Makes the pod's volumes below `folder` and rewrites its command and environment to this machine.

    Raises:
        OSError: When a volume can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    container = container_of(pod)
    places = _make_volumes(pod, container, folder, machine)
    log = folder / TERMINATION_LOG
    log.unlink(missing_ok=True)
    places[container.get("terminationMessagePath", _TERMINATION_PATH)] = log
    values: dict[str, str] = {}
    for variable in container.get("env", []):
        text = expand(str(variable["value"]), values) if "value" in variable else _reference(variable, pod)
        values[variable["name"]] = text
    values.setdefault("JOB_COMPLETION_INDEX", str(index_of(pod)))
    command = [expand(word, values) for word in [*container.get("command", []), *container.get("args", [])]]
    return Launch(
        command=_program([_relocate(_rendezvous(word, machine.port), places) for word in command]),
        env=_environment({name: _relocate(text, places) for name, text in values.items()}, pod, container, machine),
        termination_log=log,
        falls_back_to_log=container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
    )


def _make_volumes(pod: Manifest, container: dict[str, Any], folder: Path, machine: Machine) -> dict[str, Path]:
    """Creates every mounted volume. Returns mount path -> folder on this machine."""
    variables = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    places = {}
    for mount in container.get("volumeMounts", []):
        path, volume = mount["mountPath"].rstrip("/"), volumes[mount["name"]]
        if path in _NOT_REDIRECTED:
            continue
        target = folder / "volumes" / mount["name"]
        if path == (variables.get(CACHE_VARIABLE) or "").rstrip("/"):
            target = machine.cache
        elif "hostPath" in volume:
            target = Path(volume["hostPath"]["path"])
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in _files_of(volume, machine).items():
            _write_private(target / name, text)
        places[path] = target / mount["subPath"] if "subPath" in mount else target
    return places


def _files_of(volume: dict[str, Any], machine: Machine) -> dict[str, str]:
    if "configMap" in volume:
        source, data = volume["configMap"], machine.configs.get(volume["configMap"]["name"], {})
    elif "secret" in volume:
        source, data = volume["secret"], machine.secrets.get(volume["secret"]["secretName"], {})
    else:
        return {}
    if "items" in source:
        return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}
    return data


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)


def _reference(variable: dict[str, Any], pod: Manifest) -> str:
    """The value of `valueFrom.fieldRef`; the operator's children use no other source."""
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
    known = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": socket.gethostname(),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }
    match = re.match(r"metadata\.(annotations|labels)\['(.+)'\]$", path)
    if match:
        return str(pod["metadata"].get(match.group(1), {}).get(match.group(2), ""))
    return str(known.get(path, ""))


def _relocate(text: str, places: dict[str, Path]) -> str:
    """A path below a mount, as the path on this machine; `--option=/path` too."""
    option, equals, value = text.partition("=") if text.startswith("-") else ("", "", text)
    for path in sorted(places, key=len, reverse=True):
        if value == path or value.startswith(path + "/"):
            return f"{option}{equals}{places[path]}{value[len(path) :]}"
    return text


def _rendezvous(word: str, port: int) -> str:
    """All nodes are this machine, and 29500 may be taken."""
    return _PORT.sub(rf"\g<1>{port}", _ADDRESS.sub(r"\g<1>127.0.0.1", word))


def _program(command: list[str]) -> list[str]:
    """The image's interpreter is the one that runs us; its scripts stand beside it."""
    first = command[0]
    if first in _PROGRAMS:
        return [sys.executable, *command[1:]]
    beside = Path(sys.executable).parent / first
    return [str(beside), *command[1:]] if "/" not in first and beside.exists() else command


def _environment(values: dict[str, str], pod: Manifest, container: dict[str, Any], machine: Machine) -> dict[str, str]:
    """The user's environment without their keys (the trainer gets a mounted Secret), then the pod's own."""
    inherited = {name: text for name, text in os.environ.items() if not _SECRET_VARIABLES.match(name)}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(machine.port)}
    env = inherited | {"PYTHONUNBUFFERED": "1"} | values
    env |= {name: text for name, text in rendezvous.items() if name in values}
    if "LORA_METRICS_PORT" in values:
        env["LORA_METRICS_PORT"] = "0"  # nobody scrapes it here, and the pods share one machine's ports
    limits = container.get("resources", {}).get("limits", {})
    count = sum(int(amount) for name, amount in limits.items() if "/" in name)
    if count != len(machine.gpus):
        first = index_of(pod) * count
        env["CUDA_VISIBLE_DEVICES"] = ",".join(machine.gpus[first : first + count])
    return env


class PodProcess:
    """A pod that runs. Its leash is the shim's standard input, see `local_shim`."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch, folder: Path, log: Path) -> None:
        self._process, self._launch, self._folder, self._log = process, launch, folder, log

    @classmethod
    async def start(cls, pod: Manifest, folder: Path, log: Path, machine: Machine) -> PodProcess:
        """Starts the pod's command below `folder`; output goes to `log`. Raises OSError."""
        launch = prepare(pod, folder, machine)
        grace = str(pod["spec"].get("terminationGracePeriodSeconds", 30))
        shim = [sys.executable, "-I", "-S", str(Path(local_shim.__file__)), str(folder / RECORD), grace]
        output = _open_log(log)
        try:
            process = await asyncio.create_subprocess_exec(
                *shim,
                *launch.command,
                env=launch.env,
                cwd=folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(output)
        return cls(process, launch, folder, log)

    async def wait(self) -> tuple[int, str]:
        """Exit code (128 + signal where one ended it) and termination message; the folder, and Secrets, are removed."""
        code = await self._process.wait()
        self.stop()
        if code < 0:  # somebody killed the shim, so its command lives on unguarded
            kill_recorded(self._folder / RECORD)
        message = self._message(failed=code != 0)
        shutil.rmtree(self._folder, ignore_errors=True)
        return code if code >= 0 else 128 - code, message

    def stop(self) -> None:
        """SIGTERM to the command, SIGKILL after its grace period."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """SIGKILL to all its processes, now."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)

    def _message(self, *, failed: bool) -> str:
        path = self._launch.termination_log
        message = _tail(path, _MESSAGE_LIMIT_BYTES) if path.is_file() else ""
        if not message and failed and self._launch.falls_back_to_log:
            return _tail(self._log, _FALLBACK_LIMIT_BYTES)
        return message


def _open_log(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _tail(path: Path, limit_bytes: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit_bytes))
        return file.read().decode(errors="replace")


def living(record: Path) -> list[int]:
    """Pids of a pod's record that still are the processes it was written for, not strangers with their numbers."""
    try:
        entries = json.loads(record.read_text())["processes"]
        return [int(entry["pid"]) for entry in entries if local_shim.birth_of(entry["pid"]) == entry["birth"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def kill_recorded(record: Path) -> None:
    """SIGKILL to what lives of a pod, and to all it started."""
    for pid in living(record):
        local_shim.kill_tree(pid)
