"""What saving costs training: blocks of steps with a checkpoint in each, over blocks without, and how long the loop stands still.

A LoRA of rank 128 on the 10 M denoiser, saved to a directory. The share of time is that of a checkpoint every 500 steps, the
default. The same checkpoint written by the loop itself, as it would be without a thread, is timed beside it.

Run: python benchmarks/save_stall.py [--pairs 10] [--steps 12]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import rig
import torch

from lora_api.config import TrainerConfig
from lora_trainer import checkpoint, clock
from lora_trainer.saver import Saver, Saves, Snapshot
from lora_trainer.state import finished, pack, snapshot
from lora_trainer.tensorfile import HostBuffers

SIZE = "10M"
SAVE_EVERY = 500


class Saving:
    """The loop with a saver, which is asked at the first step of a block."""

    def __init__(self, folder: Path, config: TrainerConfig) -> None:
        self.ours, self.due = rig.Ours(folder, config), False
        store, fence = self.ours.reporter.store, self.ours.reporter.fence
        assert store is not None
        assert fence is not None
        self.store, self.fence = store, fence
        self.saver = Saver(store, fence, "u", "h", committed=lambda manifest: None)  # noqa: ARG005 - nobody asks
        self.saves = Saves(self.saver, self.ours.loop.group, self.ours.reporter, 0, heard_of_commit=lambda step: None)  # noqa: ARG005
        self.ours.loop.saves, self.ours.loop.after_step = self.saves, self.after_step
        self.buffers, self.stalls = HostBuffers(), list[float]()

    def after_step(self, step: int, _settings: object) -> None:
        if self.due:
            self.due, before = False, self.saves.stall_seconds
            self.saves.save(step, self.take)
            self.stalls.append(self.saves.stall_seconds - before)

    def take(self) -> Snapshot:
        begun, loop = clock.seconds(), self.ours.loop
        files = snapshot(self.ours.adapter, self.ours.optimizer, loop.state, {}, buffers=self.buffers)
        return Snapshot(loop.state.step, lambda: finished(files), begun)

    def run(self, steps: int, *, save: bool) -> rig.Times:
        self.due = save
        times = self.ours.run(steps)
        self.saves.finish()  # what is left of a save is no part of the next block
        return times

    def save_at_once(self) -> float:
        """Seconds that the loop would take to do all of it itself."""
        begin, step = time.perf_counter(), self.ours.loop.state.step
        files = pack(self.ours.adapter, self.ours.optimizer, self.ours.loop.state, {})
        checkpoint.commit(self.store, self.fence, files, step=step, uid="u", config_hash="h")
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=12, help="steps in a block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rig.make_pictures(folder / "data")
        config = rig.configuration(folder, rig.make_model(SIZE, folder / "model"))
        config = config.model_copy(update={"network": config.network.model_copy(update={"linear": 128})})
        saving = Saving(folder, config)
        saving.run(arguments.steps, save=True)  # its memory is there from now on
        saving.stalls.clear()
        pairs = rig.Pairs.of(
            lambda: saving.run(arguments.steps, save=True),
            lambda: saving.run(arguments.steps, save=False),
            arguments.pairs,
        )
        at_once = [saving.save_at_once() for _ in range(5)]
        numbers = sum(parameter.numel() for parameter in saving.ours.adapter.parameters())
        saving.ours.close()
    (median, least, most), (_, step_ms) = pairs.ratio(0), pairs.milliseconds(0)
    stall_ms, at_once_ms = 1e3 * statistics.median(saving.stalls), 1e3 * statistics.median(at_once)
    print(
        f"saving {numbers / 1e6:.1f} M numbers, {12 * numbers / 1e6:.0f} MB: a save in every {arguments.steps} steps over none, by the "
        f"clock: ratio median {median:.3f}, range {least:.3f} to {most:.3f} ({arguments.pairs} pairs)"
    )
    for name, ms in (("in the background", stall_ms), ("by the loop itself", at_once_ms)):
        share = ms / (ms + SAVE_EVERY * step_ms)
        print(
            f"saving {name}: the loop stands still for {ms:.1f} ms, {share:.3%} of the time at save_every {SAVE_EVERY} ({step_ms:.1f} ms a step)"
        )


if __name__ == "__main__":
    main()
