"""How long the operator takes from a submitted LoRATrainingJob to its pod, beside a plain batch/v1 Job.

    KUBECONFIG=... python benchmarks/submit_latency.py --namespace team-a --pairs 20

Needs a cluster with the operator installed and a profile that accepts the jobs of the namespace. Submits one plain Job
and one LoRATrainingJob after the other, in turns, and takes the time from the request until the watch tells of the pod
object. Whether pods can run does not matter. Prints the figures, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.client import CoreV1Api
from kubernetes.aio.watch import Watch

from lora_api.job import API_VERSION, KIND, PLURAL
from lora_api.names import LABEL_JOB
from lora_operator.adapters.kube_api import KubeApi, path

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
TIMEOUT_SECONDS = 60.0
AIM = 1.5
NO_NODE_HAS = "1000"  # CPUs: pods appear, but none runs and takes the machine from what is measured

Manifest = dict[str, Any]


def training_job(name: str, profile: str, image_free: Manifest | None) -> Manifest:
    """A LoRATrainingJob that is accepted; `image_free` is one from a file."""
    config = {
        "type": "diffusion_trainer",
        "device": "cpu",
        "model": {"arch": "flux2_klein_4b", "name_or_path": "/models/none"},
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "datasets": [{"folder_path": "/data/none", "resolution": [64]}],
        "train": {"steps": 10, "train_unet": True},
    }
    resources = {"nodes": 1, "gpusPerNode": 0, "cpu": NO_NODE_HAS, "memory": "32Mi"}
    spec = image_free["spec"] if image_free else {"profile": profile, "config": config, "resources": resources}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def plain_job(name: str) -> Manifest:
    """The batch/v1 Job that a person without the operator would write."""
    container = {
        "name": "main",
        "image": "registry.invalid/none:1",
        "command": ["true"],
        "resources": {"requests": {"cpu": NO_NODE_HAS, "memory": "32Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    template = {"spec": {"restartPolicy": "Never", "securityContext": security, "containers": [container]}}
    spec = {"completionMode": "Indexed", "completions": 1, "parallelism": 1, "backoffLimit": 0, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


class PodWatch:
    """Notes when the first pod of each job is told by the watch."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self._changed = asyncio.Condition()

    async def run(self, api: KubeApi, namespace: str) -> None:
        """Watches until it is cancelled."""
        async with Watch() as watch:
            core = CoreV1Api(api._client)  # noqa: SLF001 - the same connection
            async for event in watch.stream(core.list_namespaced_pod, namespace):
                labels = event["raw_object"]["metadata"].get("labels") or {}
                for name in (labels.get(LABEL_JOB), labels.get(JOB_NAME_LABEL)):
                    if name and name not in self.seen:
                        self.seen[name] = time.perf_counter()
                async with self._changed:
                    self._changed.notify_all()

    async def wait_for(self, name: str) -> float:
        """When the first pod of a job appeared."""
        async with asyncio.timeout(TIMEOUT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: name in self.seen)
        return self.seen[name]


class Bench:
    """One namespace of one cluster."""

    def __init__(self, api: KubeApi, namespace: str, watch: PodWatch, options: argparse.Namespace) -> None:
        self.api, self.namespace, self.watch = api, namespace, watch
        self.profile: str = options.profile
        self.example: Manifest | None = yaml.safe_load(options.manifest.read_text()) if options.manifest else None
        self.tag = secrets.token_hex(3)

    async def seconds(self, name: str, build: Callable[[str], Manifest]) -> float:
        """From the request to the pod."""
        manifest = build(name)
        began = time.perf_counter()
        answer = await self.api.request("POST", self._where(manifest), body=manifest)
        answer.require_ok()
        return await self.watch.wait_for(name) - began

    def ours(self, name: str) -> Manifest:
        return training_job(name, self.profile, self.example)

    async def pair(self, index: int) -> tuple[float, float]:
        """(LoRATrainingJob, plain Job); their order changes with the index."""
        names = f"submit-{self.tag}-l{index}", f"submit-{self.tag}-p{index}"
        if index % 2:
            plain = await self.seconds(names[1], plain_job)
            ours = await self.seconds(names[0], self.ours)
        else:
            ours = await self.seconds(names[0], self.ours)
            plain = await self.seconds(names[1], plain_job)
        await self._delete(self.ours(names[0]))
        await self._delete(plain_job(names[1]))
        return ours, plain

    async def burst(self, count: int, build: Callable[[str], Manifest], letter: str) -> float:
        """From the first request to the last pod of many submitted at once."""
        names = [f"burst-{self.tag}-{letter}{index}" for index in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*(self.seconds(name, build) for name in names))
        taken = max(self.watch.seen[name] for name in names) - began
        for name in names:
            await self._delete(build(name))
        return taken

    async def _delete(self, manifest: Manifest) -> None:
        where = f"{self._where(manifest)}/{manifest['metadata']['name']}"
        await self.api.request("DELETE", where, body={"propagationPolicy": "Background"})

    def _where(self, manifest: Manifest) -> str:
        plural = PLURAL if manifest["kind"] == KIND else "jobs"
        return path(manifest["apiVersion"], plural, self.namespace)


def described(values: list[float]) -> dict[str, float]:
    """Median and range, in milliseconds."""
    return {
        "median_ms": round(statistics.median(values) * 1000, 1),
        "min_ms": round(min(values) * 1000, 1),
        "max_ms": round(max(values) * 1000, 1),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns what the last line says."""
    api = await KubeApi.connect()
    watch = PodWatch()
    watching = asyncio.create_task(watch.run(api, options.namespace))
    try:
        bench = Bench(api, options.namespace, watch, options)
        await bench.pair(-2)  # connections, caches: not counted
        pairs = []
        for index in range(options.pairs):
            pairs.append(await bench.pair(index))
            await asyncio.sleep(options.pause_seconds)
        ours, plain = [a for a, _ in pairs], [b for _, b in pairs]
        ratios = [a / b for a, b in pairs]
        result: dict[str, Any] = {
            "pairs": len(pairs),
            "lora_training_job": described(ours),
            "plain_job": described(plain),
            "ratio_of_medians": round(statistics.median(ours) / statistics.median(plain), 2),
            "ratio_median": round(statistics.median(ratios), 2),
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            "added_median_ms": round(statistics.median(a - b for a, b in pairs) * 1000, 1),
            "aim": AIM,
        }
        if options.burst:
            result["burst"] = {
                "jobs": options.burst,
                "lora_training_job_seconds": round(await bench.burst(options.burst, bench.ours, "l"), 2),
                "plain_job_seconds": round(await bench.burst(options.burst, plain_job, "p"), 2),
            }
        return result
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await api.close()


def prepare_cluster(namespace: str) -> bool:
    """Brings up this machine's cluster with the operator on it, as far as it isn't there; True when it was not up."""
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    from tests.cluster import Cluster, install

    cluster = Cluster()
    started = cluster.up()
    install.install_chart(cluster, cluster.load_images())
    install.ensure_namespace(cluster, namespace)
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    return started


def remove_cluster() -> None:
    """Ends what `prepare_cluster` has started."""
    from tests.cluster import Cluster

    Cluster().down()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--namespace", default="bench")
    parser.add_argument("--pairs", type=int, default=20, help="pairs submitted one after the other")
    parser.add_argument("--burst", type=int, default=0, help="also submit this many of each kind at once")
    parser.add_argument("--profile", default="default", help="the LoRATrainingProfile to use")
    parser.add_argument("--manifest", type=Path, help="take the spec from this LoRATrainingJob")
    parser.add_argument("--pause-seconds", type=float, default=0.5, help="between pairs")
    parser.add_argument("--own-cluster", action="store_true", help="bring up this machine's cluster for it (root)")
    options = parser.parse_args()
    started = prepare_cluster(options.namespace) if options.own_cluster else False
    try:
        result = asyncio.run(run(options))
    finally:
        if started:
            remove_cluster()
    for kind in ("lora_training_job", "plain_job"):
        figures = result[kind]
        print(f"{kind:18} {figures['median_ms']:7.1f} ms  ({figures['min_ms']:.1f} to {figures['max_ms']:.1f})")
    low, high = result["ratio_range"]
    print(f"ratio              {result['ratio_of_medians']:7.2f}     ({low:.2f} to {high:.2f}), aim {AIM}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
