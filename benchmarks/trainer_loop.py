"""What our training loop adds to a step: its time over the bare forward + backward + update on the same tensors.

Three sizes of Z-Image's denoiser on one thread of the CPU. What is added does not grow with the model, so the line
through the three sizes has an intercept: the milliseconds that the loop costs per step, whatever is trained.

Run: python benchmarks/trainer_loop.py [--sizes 1M 10M 50M]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import rig
import torch

PAIRS = {"1M": (30, 12), "10M": (24, 4), "50M": (16, 2)}
"""Pairs of blocks, and steps in a block."""


def measure(size: str) -> tuple[float, float]:
    """Prints the ratios of one size; returns milliseconds per step of processor time, ours and bare."""
    pairs, steps = PAIRS[size]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rig.make_pictures(folder / "data")
        config = rig.configuration(folder, rig.make_model(size, folder / "model"))
        ours = rig.Ours(folder, config)
        bare = rig.Bare(config, [ours.maker.make(iteration, 0) for iteration in range(8)])
        ours.run(steps)
        bare.run(steps)
        measured = rig.Pairs.of(lambda: ours.run(steps), lambda: bare.run(steps), pairs)
        ours.close()
    for name, place in (("clock", 0), ("processor", 1)):
        (median, least, most), (mine, floor) = measured.ratio(place), measured.milliseconds(place)
        print(
            f"loop {size:>3} by the {name:<9}: ratio median {median:.3f}, range {least:.3f} to {most:.3f}; "
            f"{mine:.2f} ms a step, bare {floor:.2f} ms ({pairs} pairs of {steps} steps)",
            flush=True,
        )
    return measured.milliseconds(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=PAIRS, default=list(PAIRS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    points = [measure(size) for size in arguments.sizes]
    if len(points) > 1:
        ours, bare = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
        columns = torch.stack((torch.ones_like(bare), bare), dim=1) / bare[:, None]  # relative errors count alike
        intercept, slope = torch.linalg.lstsq(columns, ours / bare).solution.tolist()
        print(
            f"loop: {intercept:.2f} ms a step + {slope:.3f} x bare (processor time, least squares of relative errors)"
        )


if __name__ == "__main__":
    main()
