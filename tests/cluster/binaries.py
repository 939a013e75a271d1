"""Where the cluster's programs come from: an explicit folder, the cache, official releases, or a Go build."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import download, gobuild
from tests.cluster.gobuild import PARTS, Part
from tests.cluster.locks import exclusive
from tests.cluster.report import say
from tests.cluster.settings import ClusterError, cache_root

FOLDER_VARIABLE = "LORA_CLUSTER_BIN"


@dataclass(frozen=True)
class Origin:
    """Where a part's programs lie and how they got there."""

    part: Part
    folder: Path
    source: str


@dataclass(frozen=True)
class Binaries:
    """The programs that were found."""

    origins: tuple[Origin, ...]

    def program(self, name: str) -> Path:
        """The path of a program."""
        for origin in self.origins:
            if name in origin.part.programs:
                return origin.folder / name
        raise ClusterError(f"{name} is not among {[part.name for part in PARTS]}")


def ensure_binaries(parts: Sequence[Part] = PARTS, cache: Path | None = None) -> Binaries:
    """Finds or makes the programs of some parts and says where each came from.

    Raises:
        ClusterError: naming every source that was tried and why it gave nothing.
    """
    root = (cache or cache_root()) / "bin"
    return Binaries(tuple(_ensure_part(part, root) for part in parts))


def _ensure_part(part: Part, root: Path) -> Origin:
    explicit = os.environ.get(FOLDER_VARIABLE)
    if explicit:
        return _from_explicit_folder(part, Path(explicit))
    folder = root / f"{part.name}-{part.key()}"
    if (folder / "SOURCE").exists():
        return Origin(part, folder, f"cache ({(folder / 'SOURCE').read_text().strip()})")
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / f"{part.name}.lock", f"is making {part.name}"):
        if not (folder / "SOURCE").exists():
            _obtain(part, folder)
    return Origin(part, folder, (folder / "SOURCE").read_text().strip())


def _from_explicit_folder(part: Part, folder: Path) -> Origin:
    lacking = [name for name in part.programs if not os.access(folder / name, os.X_OK)]
    if lacking:
        raise ClusterError(f"{FOLDER_VARIABLE}={folder} has no executable {', '.join(lacking)}")
    return Origin(part, folder, f"folder {folder}")


def _obtain(part: Part, folder: Path) -> None:
    """Tries the sources in order; the folder appears complete or not at all."""
    sources: list[tuple[str, Callable[[Part, Path], None]]] = [
        ("official release", download.download),
        ("Go build", gobuild.build),
    ]
    refusals = []
    for name, obtain in sources:
        staging = Path(tempfile.mkdtemp(prefix=f".{part.name}-", dir=folder.parent))
        try:
            obtain(part, staging)
            (staging / "SOURCE").write_text(name + "\n")
            staging.chmod(0o755)
            staging.rename(folder)
        except ClusterError as error:
            refusals.append(f"{name}: {error}")
            say(f"{part.name}: no {name} ({error})")
        else:
            return
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    reasons = "\n  ".join([f"{FOLDER_VARIABLE} is not set", f"not in the cache ({folder})", *refusals])
    raise ClusterError(f"{part.name} ({', '.join(part.programs)}) could not be had:\n  {reasons}")
