"""The cluster, the images, the installed chart: made once for all stories."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import Cluster
from tests.e2e.world import SECRET, SYSTEM, World

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
def world(
    cluster: Cluster, tiny_model: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The chart is installed with the real helm, model and photographs are in S3."""
    built = cluster.load_images()
    world = World(cluster, built.trainer, built.operator)
    for bucket in ("runs", "models", "datasets"):
        if not world.s3.bucket_exists(bucket_name=bucket):
            world.s3.make_bucket(bucket_name=bucket)
    upload(world, "models", "tiny-zimage", tiny_model)
    upload(world, "datasets", "photos", photos)
    values = tmp_path_factory.mktemp("helm") / "values.yaml"
    values.write_text(yaml.safe_dump(chart_values(world)))
    world.remove_leftovers()
    chart = str(ROOT / "charts/lora-operator")
    with world.namespace(SYSTEM):
        cluster.helm("install", "lora-operator", chart, "-n", SYSTEM, "-f", str(values), "--wait", "--timeout", "120s")
        try:
            yield world
        finally:
            cluster.helm("uninstall", "lora-operator", "-n", SYSTEM, "--wait")
            cluster.kubectl("delete", "-f", str(ROOT / "crds"), "--timeout=60s")


def upload(world: World, bucket: str, prefix: str, folder: Path) -> None:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = f"{prefix}/{file.relative_to(folder).as_posix()}"
        world.s3.fput_object(bucket_name=bucket, object_name=key, file_path=str(file))


def chart_values(world: World) -> dict[str, object]:
    """What a platform team would write for this cluster."""
    repository, _, tag = world.operator_image.rpartition(":")
    secrets = {"operatorSecretName": SECRET, "jobSecretName": SECRET}
    store = {"type": "s3", "endpoint": world.cluster.s3_endpoint, "region": "us-east-1", "credentials": secrets}
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "profile": {
            "stores": [
                {"name": "default", "bucket": "runs", **store},
                {"name": "no-bucket", "bucket": "missing-bucket", **store},
            ],
            "trainer": {
                "image": world.trainer_image,
                "imagePullPolicy": "Never",
                "terminationGracePeriodSeconds": 30,
                "env": {"OMP_NUM_THREADS": "1"},
            },
            "sizing": {"nodes": 1, "gpusPerNode": 0, "cpu": "200m", "memory": "3Gi"},
            "backoff": {"initialSeconds": 6, "maxSeconds": 6},
        },
    }
