"""The product on the cluster: S3 buckets, Secrets, the chart through the real helm, and something to train on.

The stories, the benchmark and `python -m tests.cluster install` all begin here, so what people try out is what is tested.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from minio import Minio

from tests.cluster import s3
from tests.cluster.cluster import Cluster
from tests.cluster.images import Images

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/lora-operator"
SYSTEM = "lora-system"
RELEASE = "lora-operator"
SECRET = "lora-store"
BUCKETS = ("runs", "models", "datasets")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def connection(cluster: Cluster) -> Minio:
    """A client of the cluster's S3 server, with all rights."""
    return s3.client(cluster.s3_endpoint, cluster.s3_access_key, cluster.s3_secret_key)


def make_buckets(client: Minio) -> None:
    """The buckets for run directories, models and datasets, as far as they are missing."""
    for bucket in BUCKETS:
        if not client.bucket_exists(bucket_name=bucket):
            client.make_bucket(bucket_name=bucket)


def upload(client: Minio, bucket: str, prefix: str, folder: Path) -> int:
    """Copies a folder into a bucket; returns how many files it had."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        key = f"{prefix}/{file.relative_to(folder).as_posix()}"
        client.fput_object(bucket_name=bucket, object_name=key, file_path=str(file))
    return len(files)


def ensure_namespace(cluster: Cluster, name: str) -> None:
    """A namespace under the `restricted` Pod Security Standard, with the store's Secret."""
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": SECRET, "namespace": name},
            "stringData": {"accessKey": cluster.s3_access_key, "secretKey": cluster.s3_secret_key},
        },
    ]
    for item in objects:
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(item))


def chart_values(cluster: Cluster, images: Images) -> dict[str, Any]:
    """What a platform team would write for this cluster; the second store's bucket does not exist."""
    repository, _, tag = images.operator.rpartition(":")
    secrets = {"operatorSecretName": SECRET, "jobSecretName": SECRET}
    store = {"type": "s3", "endpoint": cluster.s3_endpoint, "region": "us-east-1", "credentials": secrets}
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "profile": {
            "stores": [
                {"name": "default", "bucket": "runs", **store},
                {"name": "no-bucket", "bucket": "missing-bucket", **store},
            ],
            "trainer": {
                "image": images.trainer,
                "imagePullPolicy": "Never",
                "terminationGracePeriodSeconds": 30,
                "env": {"OMP_NUM_THREADS": "1"},
            },
            "sizing": {"nodes": 1, "gpusPerNode": 0, "cpu": "200m", "memory": "3Gi"},
            "backoff": {"initialSeconds": 6, "maxSeconds": 6},
        },
    }


def install_chart(cluster: Cluster, images: Images) -> None:
    """Installs or upgrades the release, and waits until the operator is ready."""
    make_buckets(connection(cluster))
    ensure_namespace(cluster, SYSTEM)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))  # helm never upgrades CRDs
    with tempfile.NamedTemporaryFile("w", suffix=".json") as values:
        json.dump(chart_values(cluster, images), values)
        values.flush()
        cluster.helm(
            "upgrade", "--install", RELEASE, str(CHART), "-n", SYSTEM, "-f", values.name, "--wait", "--timeout", "180s"
        )  # fmt: skip


def uninstall_chart(cluster: Cluster) -> None:
    """Removes the release, its namespace and its CRDs."""
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--ignore-not-found")
    cluster.kubectl("delete", "-f", str(ROOT / "crds"), "--ignore-not-found", "--timeout=120s")
    cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=120s")
