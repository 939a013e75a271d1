"""The cluster, the images, the installed chart: made once for all stories."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, install
from tests.e2e.world import World

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stories wait for images, imports and grace periods; a stuck one is still ended and named."""
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of this session's own, unless one is up already: then that one is used and left running."""
    cluster = Cluster()
    started = cluster.up(nodes=1)
    try:
        yield cluster
    finally:
        if started and not os.environ.get("LORA_KEEP_CLUSTER"):
            cluster.down()


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quickstart trains on: a tiny Z-Image pipeline and captioned photographs, made by the product's own commands."""
    folder = tmp_path_factory.mktemp("quickstart")
    subprocess.run([sys.executable, str(ROOT / "examples/quickstart/prepare.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_model(quickstart: Path) -> Path:
    """The tiny Z-Image pipeline."""
    return quickstart / "model"


@pytest.fixture(scope="session")
def photos(quickstart: Path) -> Path:
    """The captioned photographs."""
    return quickstart / "photos"


@pytest.fixture(scope="session")
def photo() -> bytes:
    """One small picture."""
    from PIL import Image

    out = io.BytesIO()
    Image.effect_noise((96, 64), 50).convert("RGB").save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session")
def world(cluster: Cluster, tiny_model: Path, photos: Path) -> Iterator[World]:
    """The chart is installed with the real helm, model and photographs are in S3."""
    built = cluster.load_images()
    world = World(cluster, built)
    install.make_buckets(world.s3)
    world.remove_leftovers()
    install.upload(world.s3, "models", "tiny-zimage", tiny_model)
    install.upload(world.s3, "datasets", "photos", photos)
    install.install_chart(cluster, built)
    try:
        yield world
    finally:
        install.uninstall_chart(cluster)
