"""The trainer around its steps: what caching saves, what memory it takes over the bare model, and how long it takes to begin.

Run: python benchmarks/trainer_around.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import rig
import torch

EPOCHS, STARTS, MEMORY_SIZE, MEMORY_STEPS = 8, 3, "10M", 6


def caching(folder: Path, model_folder: Path) -> None:
    """An epoch whose latents come from the cache over one that encodes every picture anew."""
    cached = rig.Ours(folder, rig.configuration(folder, model_folder), "cached")
    uncached = rig.Ours(folder, rig.configuration(folder, model_folder, cache_latents=False), "uncached")
    count = cached.samples
    cached.run(count)
    uncached.run(count)
    pairs = rig.Pairs.of(lambda: cached.run(count), lambda: uncached.run(count), EPOCHS)
    cached.close()
    uncached.close()
    mid, least, most = pairs.ratio(1)
    print(
        f"epoch, cached over uncached latents: ratio median {mid:.3f}, range {least:.3f} to {most:.3f} ({EPOCHS} pairs)"
    )


def peak_megabytes(which: str, folder: Path) -> float:
    """Peak memory of a process of its own that trains a few steps: `bare` or `ours`."""
    command = [sys.executable, __file__, "--memory-of", which, str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def train_for_memory(which: str, folder: Path) -> None:
    """Trains and prints the peak; the bare one gets the tensors of a loop that was never run."""
    torch.set_num_threads(1)
    config = rig.configuration(folder, folder / "model")
    if which == "ours":
        ours = rig.Ours(folder, config, "memory")
        ours.run(MEMORY_STEPS)
        ours.close()
    else:
        batches = torch.load(folder / "batches.pt", weights_only=False)
        rig.Bare(config, batches).run(MEMORY_STEPS)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory(folder: Path) -> None:
    """Peak memory of the loop over that of the floor, each in a process of its own."""
    rig.make_model(MEMORY_SIZE, folder / "model")
    prepared = rig.Ours(folder, rig.configuration(folder, folder / "model"), "prepared")
    torch.save([prepared.maker.make(iteration, 0) for iteration in range(8)], folder / "batches.pt")
    prepared.close()
    pairs = [(peak_megabytes("ours", folder), peak_megabytes("bare", folder)) for _ in range(STARTS)]
    ours, bare = (median(column) for column in zip(*pairs, strict=True))
    print(
        f"peak memory of {MEMORY_SIZE}: {ours:.0f} MB, bare {bare:.0f} MB; ratio {ours / bare:.3f} (median of {STARTS})"
    )


def start_up(folder: Path, model_folder: Path) -> None:
    """Where the seconds before the first step go, in a fresh process and a fresh run directory, with an empty cache and a full one."""
    phases: dict[str, dict[str, list[float]]] = {"empty": defaultdict(list), "full": defaultdict(list)}
    for number in range(STARTS):
        cache = folder / f"cache-{number}"
        for kind, seconds_of in phases.items():
            out = folder / f"out-{number}-{kind}"
            subprocess.run(
                [
                    sys.executable, "-m", "lora_trainer", "train", "--base_model", str(model_folder), "--arch", rig.ARCH,
                    "--train_data", str(folder / "data"), "--output_dir", str(out), "--resolution", "128",
                    "--steps", "2", "--device", "cpu", "--mixed_precision", "fp32",
                ],
                check=True, capture_output=True, env={**os.environ, "LORA_CACHE_DIR": str(cache)},
            )  # fmt: skip
            line = json.loads(next(out.rglob("metrics/000001.jsonl")).read_text().splitlines()[0])
            for name, seconds in line["startup_seconds"].items():
                seconds_of[name].append(seconds)
            seconds_of["all"].append(sum(line["startup_seconds"].values()))
    for kind, seconds_of in phases.items():
        parts = ", ".join(f"{name} {median(seconds):.2f} s" for name, seconds in seconds_of.items())
        print(f"from claim to first step, {kind} cache: {parts} (median of {STARTS})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-of", nargs=2, metavar=("WHICH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        train_for_memory(arguments.memory_of[0], Path(arguments.memory_of[1]))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rig.make_pictures(folder / "data")
        small = rig.make_tiny(rig.ARCH, folder / "small")
        caching(folder, small)
        memory(folder)
        start_up(folder, small)


if __name__ == "__main__":
    main()
