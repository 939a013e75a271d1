"""Support for tests that train: a job in a folder, run in this process, interrupted where a test wants it."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from lora_api import layout
from lora_api.run import ExitWord, Progress, RunConfig
from lora_api.stores import DirectoryStore
from tests.cluster.s3 import free_ports

ROOT = Path(__file__).resolve().parents[2]
SIZES = [(64, 64), (64, 64), (96, 64), (64, 64), (64, 96)]


def make_pictures(folder: Path, sizes: list[tuple[int, int]] = SIZES) -> Path:
    """Pictures of colour gradients with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
        pixels = np.stack([across, down, np.full_like(across, number / len(sizes))], axis=-1)
        Image.fromarray((pixels * 255).astype(np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"gradient number {number}")
    return folder


class Crash(Exception):  # noqa: N818 - an event, not an error of ours
    """Stands for a process that is gone at once."""


class Job:
    """One job: configuration, run directory, and ways to run it."""

    def __init__(
        self, folder: Path, model: Path, data: Path, cache: Path, arch: str = "zimage", **changes: Any
    ) -> None:
        self.folder, self.cache = folder, cache
        self.credentials: Path | None = None
        self.config: dict[str, Any] = {
            "device": "cpu",
            "model": {"arch": arch, "name_or_path": str(model)},
            "network": {"type": "lora", "linear": 2},
            "datasets": [{"folder_path": str(data), "resolution": [64]}],
            "train": {"steps": 8, "lr": 1e-3, "dtype": "fp32"},
            "save": {"save_every": 3, "dtype": "fp32"},
        }
        self.document: dict[str, Any] = {}
        self.change(**changes)

    def change(self, **changes: Any) -> Job:
        """Merges blocks into the configuration."""
        for block, values in changes.items():
            if isinstance(values, dict):
                self.config.setdefault(block, {}).update(values)
            else:
                self.config[block] = values
        return self

    def copy(self, name: str) -> Job:
        """The same job in a run directory of its own."""
        twin = copy.deepcopy(self)
        twin.folder = self.folder.with_name(name)
        return twin

    @property
    def store(self) -> DirectoryStore:
        """The run directory."""
        return DirectoryStore(self.folder / "run")

    def write(self) -> Path:
        """The run configuration as the operator writes it."""
        document = {
            "jobName": "mascot",
            "namespace": "team-a",
            "uid": "u1",
            "attempt": 1,
            "config": self.config,
            "store": {"name": "disk", "type": "directory", "directory": str(self.folder)},
            "path": "run",
        }
        document |= self.document
        RunConfig.model_validate_json(json.dumps(document))
        return self.write_raw(json.dumps(document))

    def write_raw(self, text: str) -> Path:
        """Anything as run configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "run.json"
        path.write_text(text)
        return path

    def run(
        self,
        *,
        stop_after: int | None = None,
        crash_after: int | None = None,
        path: Path | None = None,
        hook: Callable[[Any, int], None] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> int:
        """Runs one start in this process; returns its exit code.

        Args:
            stop_after: Step after which a SIGTERM arrives.
            crash_after: Step after which the process is gone, without saving.
            path: Another run configuration.
            hook: Called with the session and the step after each update, before anything is saved.
            rank: Of this process, where `run_ranks` runs several.
            world_size: How many there are.
        """
        from lora_trainer.environment import Environment
        from lora_trainer.session import Session
        from lora_trainer.stopping import StopRequest
        from lora_trainer.train import train

        stop = StopRequest()
        original = Session._after_step

        def after_step(session: Session, step: int, settings: Any) -> None:
            if hook is not None:
                hook(session, step)
            original(session, step, settings)
            if step == stop_after:
                stop.signal_name = "SIGTERM"
            if step == crash_after:
                raise Crash

        environment = Environment(
            cache_folder=self.cache,
            credentials_folder=self.credentials,
            termination_log=self.folder / ("termination-log" if rank == 0 else f"termination-log-{rank}"),
            heartbeat_seconds=0.05,
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
        )
        with ExitStack() as stack:
            stack.enter_context(patch.object(Session, "_after_step", after_step))
            return train(path or self.write(), environment, stop)

    def word(self) -> ExitWord:
        """How the last start ended."""
        return ExitWord.model_validate_json((self.folder / "termination-log").read_text())

    def progress(self) -> Progress:
        """The last heartbeat."""
        return Progress.model_validate_json(self.store.get(layout.PROGRESS) or b"")

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints."""
        keys = [item.key for item in self.store.list(layout.CHECKPOINTS) if layout.is_checkpoint_manifest(item.key)]
        return [json.loads(self.store.get(key) or b"")["step"] for key in keys]

    def newest(self) -> dict[str, bytes]:
        """The files of the newest checkpoint."""
        from lora_trainer import checkpoint

        found, _ = checkpoint.newest(self.store)
        assert found is not None
        return dict(found.files)

    def metrics(self, start: int = 1) -> list[dict[str, Any]]:
        """The metric lines of a start."""
        return [json.loads(line) for line in (self.store.get(layout.metrics(start)) or b"").splitlines()]

    def environment(self) -> dict[str, str]:
        """Variables for a process that runs this job."""
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            "LORA_RUN_CONFIG": str(self.write()),
            "LORA_CACHE_DIR": str(self.cache),
            "LORA_TERMINATION_LOG": str(self.folder / "termination-log"),
            "LORA_HEARTBEAT_SECONDS": "0.1",
        }


def run_ranks(job: Job, each: list[dict[str, Any]]) -> list[int]:
    """Runs one start as a group of ranks; returns their exit codes.

    Each is a fork of a process that has the libraries and nothing else: this one may have computed gradients, after which
    torch can't be forked.

    Args:
        job: What to train.
        each: Options of `Job.run`, one for each rank; they have to be picklable.
    """
    path, port = job.write(), free_ports(1)[0]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lora_trainer.session", "peft", "diffusers", __name__])
    ranks = [
        context.Process(target=_run_rank, args=(job, path, port, (rank, len(each)), options))
        for rank, options in enumerate(each)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [int(process.exitcode if process.exitcode is not None else 99) for process in ranks]


def _run_rank(job: Job, path: Path, port: int, place: tuple[int, int], options: dict[str, Any]) -> None:
    import torch

    rank, world_size = place

    torch.set_num_threads(1)
    code = 99
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        code = job.run(path=path, rank=rank, world_size=world_size, **options)
    finally:
        os._exit(code)


def await_true(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    """Waits until something is true, or fails with what it waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


def noisy_pictures(model: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    """Latents, noise levels and conditions of two pictures, as `velocity` takes them."""
    import torch

    channels, side = (16, 8) if type(model).__name__ == "ZImageModel" else (64, 4)
    x = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(seed))
    return x, torch.tensor([0.3, 0.8]), model.collate([model.encode_text("a red cube")] * 2)


def answer(model: Any, seed: int = 0) -> Any:
    """The velocity of two noisy pictures."""
    import torch

    with torch.no_grad():
        return model.velocity(*noisy_pictures(model, seed))


def disturb(adapter: Any, seed: int = 1, std: float = 0.2) -> None:
    """Gives every parameter another value, as training would; magnitudes stay near the norms they start at."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.data.copy_(parameter.data * (1 + noise) if name.endswith("magnitude_vector") else noise)
