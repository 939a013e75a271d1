"""What the stories are told with: a cluster, an installed chart, an S3 server, and ways to wait for what happens."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config, watch
from minio.error import S3Error

from tests.cluster import Cluster, ClusterError, Images, install
from tests.cluster.install import SECRET, SYSTEM

GROUP, VERSION, PLURAL = "lora-operator.io", "v1alpha1", "loratrainingjobs"
BUCKET = "runs"
Object = dict[str, Any]


class World:
    """A person with a kubeconfig, S3 access and root on the node."""

    def __init__(self, cluster: Cluster, images: Images) -> None:
        self.cluster = cluster
        self.trainer_image, self.operator_image = images.trainer, images.operator
        api = config.new_client_from_config(str(cluster.kubeconfig))
        self.core, self.batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self.custom, self.scheduling = client.CustomObjectsApi(api), client.SchedulingV1Api(api)
        self.s3 = install.connection(cluster)

    # ---- making things -------------------------------------------------------------------------------------------
    @contextmanager
    def namespace(self, name: str, *, secret: bool = True) -> Iterator[str]:
        """A namespace under the `restricted` Pod Security Standard, with the jobs' Secret; removed at the end."""
        self.core.create_namespace({"metadata": {"name": name, "labels": install.RESTRICTED}})
        if secret:
            self.make_secret(name)
        try:
            yield name
        finally:
            self.core.delete_namespace(name)
            self.wait("namespace to be gone", lambda: not self.namespace_exists(name), 120)

    def remove_leftovers(self) -> None:
        """What an earlier session that was cut short has left in a cluster that still runs, and in its store."""
        left = [item.metadata.name for item in self.core.list_namespace().items]
        for name in left:
            if name.startswith("story-") or name == SYSTEM:
                self.cluster.kubectl("delete", "namespace", name, "--timeout=120s")
        self.cluster.kubectl("delete", "priorityclass", "urgent", "--ignore-not-found")
        for item in self.s3.list_objects(bucket_name=BUCKET, prefix="story-", recursive=True):
            self.s3.remove_object(bucket_name=BUCKET, object_name=str(item.object_name))

    def namespace_exists(self, name: str) -> bool:
        return any(item.metadata.name == name for item in self.core.list_namespace().items)

    def make_secret(self, namespace: str) -> None:
        data = {"accessKey": self.cluster.s3_access_key, "secretKey": self.cluster.s3_secret_key}
        self.core.create_namespaced_secret(namespace, {"metadata": {"name": SECRET}, "stringData": data})

    def apply(self, manifest: Object) -> str:
        """`kubectl apply -f -`, with the server's own validation."""
        return self.cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def refused(self, manifest: Object) -> str:
        """What kubectl says when the manifest is refused; fails when it is not."""
        try:
            said = self.apply(manifest)
        except ClusterError as error:
            return str(error)
        raise AssertionError(f"accepted: {said}")

    # ---- looking -------------------------------------------------------------------------------------------------
    def job(self, namespace: str, name: str) -> Object:
        return dict(self.custom.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name))

    def pods(self, namespace: str) -> list[Any]:
        return list(self.core.list_namespaced_pod(namespace).items)

    def events(self, namespace: str, name: str) -> list[tuple[str, str]]:
        """(reason, message) of the job's events, oldest first."""
        listed = self.core.list_namespaced_event(namespace).items
        mine = [e for e in listed if e.involved_object.name == name and e.involved_object.kind == "LoRATrainingJob"]
        mine.sort(key=lambda e: e.metadata.creation_timestamp)
        return [(event.reason, event.message) for event in mine]

    def columns(self, namespace: str, name: str) -> list[str]:
        """The cells of `kubectl get ltj NAME`."""
        return self.cluster.kubectl("get", "ltj", name, "-n", namespace, "--no-headers").split()

    def wait_job(
        self,
        namespace: str,
        name: str,
        until: Callable[[Object], bool],
        seconds: float,
        each: Callable[[Object], None] | None = None,
    ) -> Object:
        """The job as soon as `until` holds, seen through a watch; `each` sees every version."""
        deadline = time.monotonic() + seconds
        last: Object = {}
        while time.monotonic() < deadline:
            stream = watch.Watch().stream(
                self.custom.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL,
                field_selector=f"metadata.name={name}", timeout_seconds=max(1, int(deadline - time.monotonic())),
            )  # fmt: skip
            for happened in stream:
                last = happened["object"]
                if each is not None:
                    each(last)
                if until(last):
                    return last
        raise AssertionError(f"{namespace}/{name} did not get there in {seconds} s:\n{self.describe(namespace, name)}")

    def wait_phase(self, namespace: str, name: str, *phases: str, seconds: float = 150, **more: Any) -> Object:
        """The job once its phase is one of these; ending in another one is an error at once."""

        def until(job: Object) -> bool:
            phase = job.get("status", {}).get("phase")
            if phase in {"Failed", "Succeeded"} - set(phases):
                raise AssertionError(f"{namespace}/{name} is {phase}:\n{self.describe(namespace, name)}")
            return phase in phases

        return self.wait_job(namespace, name, until, seconds, **more)

    @staticmethod
    def wait(what: str, until: Callable[[], Any], seconds: float) -> Any:
        """For what sends no events: asks until the answer is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = until()
            if answer:
                return answer
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds} s for {what}")

    def describe(self, namespace: str, name: str) -> str:
        """Everything a person would look at when a story goes wrong."""
        text = self.cluster.kubectl("describe", "ltj", name, "-n", namespace, check=False)
        text += self.cluster.kubectl("get", "pods,jobs", "-n", namespace, "-o", "wide", check=False)
        for pod in self.pods(namespace):
            text += f"--- {pod.metadata.name}\n"
            text += self.cluster.kubectl("logs", pod.metadata.name, "-n", namespace, "--tail=40", check=False)
        return (
            text
            + "--- operator\n"
            + self.cluster.kubectl(
                "logs", "-n", SYSTEM, "-l", "app.kubernetes.io/name=lora-operator", "--tail=40", check=False
            )
        )

    # ---- the run directory ---------------------------------------------------------------------------------------
    def keys(self, prefix: str) -> list[str]:
        return sorted(
            str(item.object_name) for item in self.s3.list_objects(bucket_name=BUCKET, prefix=prefix, recursive=True)
        )

    def read(self, key: str) -> bytes | None:
        try:
            response = self.s3.get_object(bucket_name=BUCKET, object_name=key)
        except S3Error:
            return None
        try:
            return bytes(response.read())
        finally:
            response.close()
            response.release_conn()

    def manifests(self, run: str) -> dict[int, str]:
        """Step -> key of the newest manifest of that step below `run/`."""
        keys = [key for key in self.keys(f"{run}/checkpoints/") if key.endswith("/manifest.json")]
        return {json.loads(self.read(key) or b"{}").get("step", -1): key for key in keys}

    def progress(self, run: str) -> Object:
        return dict(json.loads(self.read(f"{run}/progress.json") or b"{}"))

    def wait_checkpoint(self, run: str, count: int = 1, seconds: float = 120) -> list[int]:
        """The committed steps, once there are `count` of them."""
        return sorted(
            self.wait(f"{count} checkpoints in {run}", lambda: len(m := self.manifests(run)) >= count and m, seconds)
        )

    def adapter_digest(self, run: str) -> str:
        """Hash of the final adapter's tensors (its metadata holds versions and times)."""
        data = self.read(f"{run}/final/adapter.safetensors")
        assert data is not None, f"{run} has no final adapter"
        header = int.from_bytes(data[:8], "little")
        entries = {k: v for k, v in json.loads(data[8 : 8 + header]).items() if k != "__metadata__"}
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode() + data[8 + header :]).hexdigest()

    # ---- doing harm ----------------------------------------------------------------------------------------------
    def kill_trainer(self, pod: str) -> int:
        """`kill -9` of the trainer's processes in a pod, from the node. Returns how many there were."""
        killed = 0
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"HOSTNAME={pod_hostname(pod)}".encode() in environment and b"lora_trainer" in command:
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
        return killed

    def delete_operator_pod(self) -> None:
        """The operator dies at once; its Deployment brings another."""
        self.cluster.kubectl(
            "delete",
            "pod",
            "-n",
            SYSTEM,
            "-l",
            "app.kubernetes.io/name=lora-operator",
            "--grace-period=0",
            "--force",
            "--wait=false",
        )

    def operator_is_ready(self) -> bool:
        pods = self.core.list_namespaced_pod(SYSTEM, label_selector="app.kubernetes.io/name=lora-operator").items
        return len(pods) == 1 and any(c.type == "Ready" and c.status == "True" for c in pods[0].status.conditions or [])


def pod_hostname(pod: str) -> str:
    """Indexed Jobs name pods NAME-INDEX-RANDOM and hosts NAME-INDEX."""
    return pod.rpartition("-")[0]


def condition(job: Object, kind: str) -> Object:
    found = [c for c in job["status"]["conditions"] if c["type"] == kind]
    assert found, f"no condition {kind} in {[c['type'] for c in job['status']['conditions']]}"
    return dict(found[0])


def manifest(namespace: str, name: str, *, steps: int = 240, save_every: int = 40, **spec: Any) -> Object:
    """A job on the tiny Z-Image that takes a few seconds; `spec` is merged into its spec."""
    base: Object = {
        "profile": "default",
        "config": {
            "device": "cpu",
            "trigger_word": "mascotxyz",
            "performance_log_every": 50,
            "model": {"arch": "zimage", "name_or_path": "s3://models/tiny-zimage"},
            "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
            "datasets": [{"folder_path": "s3://datasets/photos", "resolution": [64], "caption_dropout": 0.1}],
            "train": {"steps": steps, "batch_size": 1, "dtype": "fp32", "lr": 1e-3, "seed": 7},
            "save": {"dtype": "fp32", "save_every": save_every, "max_step_saves": 3},
            "sample": {"prompts": ["a photo of mascotxyz"], "width": 64, "height": 64, "sample_steps": 2},
        },
        "resources": {"nodes": 1, "gpusPerNode": 0},
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LoRATrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": merged(base, spec),
    }


def merged(base: Object, over: Object) -> Object:
    """`over` on top of `base`, object by object; lists are replaced."""
    result = dict(base)
    for key, value in over.items():
        result[key] = (
            merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return result
