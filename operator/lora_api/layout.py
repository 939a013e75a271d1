"""Keys in the run directory. Every key of the contract is spelled here and nowhere else."""

from __future__ import annotations

RUN_FILE = "run.json"
CONTROL = "control.json"
PROGRESS = "progress.json"
STARTS = "starts/"
CHECKPOINTS = "checkpoints/"
METRICS = "metrics/"
SAMPLES = "samples/"
FINAL = "final/"
MANIFEST = "manifest.json"
FINAL_MANIFEST = FINAL + MANIFEST


def start_claim(start: int) -> str:
    """Key of a start's claim; `start` counts from 1."""
    return f"{STARTS}{start:06d}.json"


def metrics(start: int) -> str:
    """Key of a start's metric lines."""
    return f"{METRICS}{start:06d}.jsonl"


def checkpoint_folder(step: int, start: int) -> str:
    """Folder (with its slash) of the checkpoint that `start` wrote after `step` updates."""
    return f"{CHECKPOINTS}step-{step:09d}/{start:06d}/"


def checkpoint_manifest(step: int, start: int) -> str:
    """Key whose existence commits a checkpoint."""
    return checkpoint_folder(step, start) + MANIFEST


def samples_folder(step: int) -> str:
    """Folder (with its slash) of the samples drawn after `step` updates."""
    return f"{SAMPLES}step-{step:09d}/"


def is_checkpoint_manifest(key: str) -> bool:
    """Whether `key` (relative to the run directory) is a checkpoint's manifest."""
    return key.startswith(CHECKPOINTS) and key.endswith("/" + MANIFEST)


def run_prefix(store_prefix: str, path: str) -> str:
    """Prefix of a run directory in its bucket, always with a slash at its end: `lora/` never covers `lora-2/`."""
    return "/".join(part.strip("/") for part in (store_prefix, path) if part.strip("/")) + "/"
