"""How much time our training loop adds to a step: its time over the bare forward + backward + update on the same tensors.

Tiny Z-Image on the CPU, where a step takes milliseconds and every microsecond of ours shows; a real step takes a
thousand times longer. Blocks of both are interleaved, so that a busy machine slows both.

Run: python benchmarks/trainer_loop.py [--blocks 40] [--steps 15]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
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
from lora_trainer.reporting import Reporter
from lora_trainer.runtime import Group
from lora_trainer.settings import Settings
from lora_trainer.state import TrainState, build_optimizer
from lora_trainer.stopping import StopRequest
from lora_trainer.tiny import make_tiny

CPU = torch.device("cpu")
ARCH = "zimage"


def make_data(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    folder.mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (128, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture number {number}")


class Times(NamedTuple):
    """Milliseconds per step: by the clock, and of the processor (all threads), which other programs don't disturb."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Times:
        return cls(1e3 * time.perf_counter(), 1e3 * time.process_time())

    def since(self, begin: Times, steps: int) -> Times:
        return Times((self.wall - begin.wall) / steps, (self.processor - begin.processor) / steps)


class Ours:
    """The whole loop: data from the cache, counter-based noise, clipping, checks, heartbeat, control."""

    def __init__(self, folder: Path, model_folder: Path, config: TrainerConfig) -> None:
        family = family_for(ARCH)
        self.model = family.load(model_folder, dtype=torch.float32, device=CPU)
        samples = plan_samples(
            [(folder / "data", config.datasets[0])],
            trigger=None,
            multiple=family.size_multiple,
            prints=Fingerprints(None),
        )
        cache = TensorCache(folder / "cache")
        encode_pictures(samples, self.model, cache, share=(0, 1), report=str)
        encode_captions(captions_of(samples), self.model, cache, share=(0, 1), report=str)
        self.model.free_encoders()
        adapter = add_adapter(self.model, config.network, seed=0)
        optimizer = build_optimizer(adapter.parameters(), config.train)
        share = Share(config.train.batch_size, 1)
        order = BatchOrder([sample.bucket for sample in samples], share.global_batch, 42)
        self.maker = BatchMaker(
            SampleReader(samples, self.model, cache), order, self.model, share, seed=42, density="logit_normal"
        )
        self.batches = Batches(self.maker.make, 0, 1, batches_ahead(CPU))
        store = DirectoryStore(folder / "run")
        self.reporter = Reporter(store, 1, 1, fence=Fence.raise_up(store, 1))
        self.reporter.open()
        control = ControlWatch(store)
        control.start()
        self.loop = Loop(
            config=config,
            settings=replace(Settings.of(config), steps=0),
            state=TrainState(),
            model=self.model,
            optimizer=optimizer,
            batches=self.batches,
            group=Group(0, 1, CPU),
            stop=StopRequest(),
            reporter=self.reporter,
            control=control,
        )

    def run(self, steps: int) -> Times:
        self.loop.settings = replace(self.loop.settings, steps=self.loop.state.step + steps)
        begin = Times.now()
        self.loop.run()
        return Times.now().since(begin, steps)


class Bare:
    """Forward, backward, update, on tensors that are there already."""

    def __init__(self, ours: Ours, model_folder: Path, config: TrainerConfig) -> None:
        self.model = family_for(ARCH).load(model_folder, dtype=torch.float32, device=CPU)
        self.model.free_encoders()
        adapter = add_adapter(self.model, config.network, seed=0)
        self.optimizer = build_optimizer(adapter.parameters(), config.train)
        self.batches = [ours.maker.make(iteration, 0) for iteration in range(16)]

    def run(self, steps: int) -> Times:
        begin = Times.now()
        for step in range(steps):
            batch = self.batches[step % len(self.batches)]
            mse_loss(self.model.velocity(batch.x_t, batch.sigma, batch.conditioning), batch.target).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Times.now().since(begin, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=15, help="steps in a block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_data(folder / "data")
        model_folder = make_tiny(ARCH, folder / "model")
        config = TrainerConfig.model_validate(
            {
                "device": "cpu",
                "model": {"arch": ARCH, "name_or_path": str(model_folder)},
                "network": {"type": "lora", "linear": 16},
                "datasets": [{"folder_path": str(folder / "data"), "resolution": [128]}],
                "train": {"batch_size": 2, "dtype": "fp32"},
            }
        )
        ours = Ours(folder, model_folder, config)
        bare = Bare(ours, model_folder, config)
        ours.run(arguments.steps)
        bare.run(arguments.steps)
        pairs = []
        for number in range(arguments.blocks):  # whoever goes first changes, so that neither gets the warmer cache
            times = {which: which.run(arguments.steps) for which in ((ours, bare) if number % 2 else (bare, ours))}
            pairs.append((times[ours], times[bare]))
        ours.batches.close()
    for name, place in (("clock", 0), ("processor", 1)):
        ratios = sorted(a[place] / b[place] for a, b in pairs)
        ours_ms, bare_ms = (statistics.median(times[place] for times in column) for column in zip(*pairs, strict=True))
        print(
            f"{name}: loop {ours_ms:.2f} ms per step, bare {bare_ms:.2f} ms; ratio median {statistics.median(ratios):.3f}, "
            f"range {ratios[0]:.3f} to {ratios[-1]:.3f} ({arguments.blocks} pairs of {arguments.steps} steps)"
        )


if __name__ == "__main__":
    main()
