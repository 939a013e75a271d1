"""What the trainer's benchmarks share: models of a chosen size, made-up pictures, the loop as a job has it, and its floor.

The floor is forward + backward + update with the same model on the same tensors, which are there already.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import mse_loss

from lora_api.config import TrainerConfig
from lora_api.stores import DirectoryStore
from lora_trainer.control import ControlWatch
from lora_trainer.data.cache import TensorCache
from lora_trainer.data.encode import captions_of, encode_captions, encode_pictures
from lora_trainer.data.sampler import BatchOrder
from lora_trainer.data.samples import Fingerprints, plan_samples
from lora_trainer.data.stream import Batches, BatchMaker, SampleReader, Share, batches_ahead
from lora_trainer.families import family_for
from lora_trainer.fence import Fence
from lora_trainer.loop import Loop
from lora_trainer.networks import add_adapter
from lora_trainer.objective import Objective
from lora_trainer.optimizers import build_optimizer
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import Group
from lora_trainer.settings import Settings
from lora_trainer.state import TrainState
from lora_trainer.stopping import StopRequest
from lora_trainer.tiny import make_tiny

CPU = torch.device("cpu")
ARCH = "zimage"

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"dim": 128, "n_layers": 2, "n_heads": 8},
    "10M": {"dim": 320, "n_layers": 4, "n_heads": 20},
    "50M": {"dim": 640, "n_layers": 7, "n_heads": 40},
}
"""Denoisers by their number of parameters: Z-Image's own class, narrower and with fewer layers."""


def make_pictures(folder: Path, count: int = 6, side: int = 128) -> Path:
    """Pictures of noise with captions."""
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture number {number}")
    return folder


def make_model(size: str, folder: Path) -> Path:
    """The tiny pipeline with a denoiser of a size of `SIZES`."""
    from diffusers import ZImageTransformer2DModel

    make_tiny(ARCH, folder)
    part = folder / "transformer"
    config = json.loads((part / "config.json").read_text())
    changed = {name: value for name, value in config.items() if not name.startswith("_")} | SIZES[size]
    changed["n_kv_heads"] = changed["n_heads"]
    shutil.rmtree(part)
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(**changed)
    for name, parameter in transformer.named_parameters():
        if "pad_token" in name:
            torch.nn.init.normal_(parameter, 0, 0.02)
    transformer.save_pretrained(part)
    return folder


def configuration(folder: Path, model_folder: Path, **dataset: Any) -> TrainerConfig:
    """A plain LoRA of rank 16 on the pictures of `folder`."""
    return TrainerConfig.model_validate(
        {
            "device": "cpu",
            "model": {"arch": ARCH, "name_or_path": str(model_folder)},
            "network": {"type": "lora", "linear": 16},
            "datasets": [{"folder_path": str(folder / "data"), "resolution": [128], **dataset}],
            "train": {"batch_size": 1, "dtype": "fp32"},
        }
    )


class Times(NamedTuple):
    """Milliseconds per step: by the clock, and of the processor (all threads), which other programs disturb less."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Times:
        return cls(1e3 * time.perf_counter(), 1e3 * time.process_time())

    def since(self, begin: Times, steps: int) -> Times:
        return Times((self.wall - begin.wall) / steps, (self.processor - begin.processor) / steps)


class Ours:
    """The whole loop: data from the cache, counter-based noise, clipping, checks, heartbeat, control."""

    def __init__(self, folder: Path, config: TrainerConfig, name: str = "run") -> None:
        family = family_for(ARCH)
        self.model = family.load(Path(config.model.name_or_path), dtype=torch.float32, device=CPU)
        samples = plan_samples(
            [(folder / "data", config.datasets[0])],
            trigger=None,
            multiple=family.size_multiple,
            prints=Fingerprints(None),
        )
        self.samples = len(samples)
        cache = TensorCache(folder / "cache")
        encode_pictures(samples, self.model, cache, share=(0, 1), report=str)
        encode_captions(captions_of(samples), self.model, cache, share=(0, 1), report=str)
        self.model.free_encoders()
        self.adapter = add_adapter(self.model, config.network, seed=0)
        self.optimizer = build_optimizer(self.adapter.parameters(), config.train)
        share = Share(config.train.batch_size, 1)
        order = BatchOrder([sample.bucket for sample in samples], share.global_batch, 42)
        self.maker = BatchMaker(
            SampleReader(samples, self.model, cache), order, self.model, share, Objective.of(config.train, self.model)
        )
        self.batches = Batches(self.maker.make, 0, 1, batches_ahead(CPU))
        store = DirectoryStore(folder / name)
        self.reporter = Reporter(store, 1, 1, fence=Fence.raise_up(store, 1))
        self.reporter.open()
        self.control = ControlWatch(store)
        self.control.start()
        self.loop = Loop(
            config=config,
            settings=replace(Settings.of(config), steps=0),
            state=TrainState(),
            model=self.model,
            optimizer=self.optimizer,
            batches=self.batches,
            group=Group(0, 1, CPU),
            stop=StopRequest(),
            reporter=self.reporter,
            control=self.control,
        )

    def run(self, steps: int) -> Times:
        self.loop.settings = replace(self.loop.settings, steps=self.loop.state.step + steps)
        begin = Times.now()
        self.loop.run()
        return Times.now().since(begin, steps)

    def close(self) -> None:
        self.batches.close()
        self.control.close()


class Bare:
    """Forward, backward, update, on tensors that are there already."""

    def __init__(self, config: TrainerConfig, batches: list[Any]) -> None:
        self.model = family_for(ARCH).load(Path(config.model.name_or_path), dtype=torch.float32, device=CPU)
        self.model.free_encoders()
        adapter = add_adapter(self.model, config.network, seed=0)
        self.optimizer = build_optimizer(adapter.parameters(), config.train)
        self.batches = batches

    def run(self, steps: int) -> Times:
        begin = Times.now()
        for step in range(steps):
            batch = self.batches[step % len(self.batches)]
            mse_loss(self.model.predict(batch.x_t, batch.time, batch.conditioning), batch.target).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Times.now().since(begin, steps)


@dataclass(frozen=True)
class Pairs:
    """Interleaved measurements of two things."""

    first: list[Times]
    second: list[Times]

    @classmethod
    def of(cls, first: Callable[[], Times], second: Callable[[], Times], count: int) -> Pairs:
        """Both, `count` times; whoever goes first changes, so that neither gets the warmer cache."""
        made = cls([], [])
        for number in range(count):
            for which in (0, 1) if number % 2 else (1, 0):
                (made.first, made.second)[which].append((first, second)[which]())
        return made

    def ratio(self, place: int) -> tuple[float, float, float]:
        """Median, least and greatest of first / second; by the clock (0) or the processor (1)."""
        ratios = sorted(a[place] / b[place] for a, b in zip(self.first, self.second, strict=True))
        return statistics.median(ratios), ratios[0], ratios[-1]

    def milliseconds(self, place: int) -> tuple[float, float]:
        """Medians of both."""
        return statistics.median(t[place] for t in self.first), statistics.median(t[place] for t in self.second)
