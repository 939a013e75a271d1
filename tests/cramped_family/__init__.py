"""A model family of another package, for tests: it runs out of memory where the environment says so."""

from __future__ import annotations

from pathlib import Path

SOURCES = Path(__file__).parent


def install(folder: Path) -> str:
    """The metadata that an installation leaves, in `folder`; returns what has to be on PYTHONPATH."""
    info = folder / "cramped_family-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cramped-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lora_trainer.families]\ncramped = cramped_family:Cramped\n")
    return f"{SOURCES}:{folder}"
