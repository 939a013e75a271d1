"""The operator as a process beside a real API server, under the rights that its chart grants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from lora_operator.core.views import Manifest
from tests.cluster.apiserver import ApiServer
from tests.cluster.binaries import ensure_binaries
from tests.cluster.gobuild import HELM
from tests.cluster.pki import Identity
from tests.cluster.report import wait_until
from tests.cluster.s3 import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "lora-operator"
BUCKET = "lora"
SYSTEM = "lora-system"  # the operator's namespace
ACCOUNT = Identity(
    f"system:serviceaccount:{SYSTEM}:lora-operator",
    ("system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}", "system:authenticated"),
)
JOBS = "/apis/lora-operator.io/v1alpha1/namespaces/{}/loratrainingjobs"
BATCH = "/apis/batch/v1/namespaces/{}/jobs"
CORE = "/api/v1/namespaces/{}/"
STATUS_PATCH = "application/merge-patch+json"


def render_chart(values: Manifest, *templates: str) -> list[Manifest]:
    """The chart's objects, as `helm template` makes them; of some templates only where they are named."""
    command = [
        str(ensure_binaries([HELM]).program("helm")),
        "template",
        "lora-operator",
        str(CHART),
        "-n",
        SYSTEM,
        "-f",
        "-",
    ]
    for template in templates:
        command += ["-s", f"templates/{template}"]
    done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def install_crds(server: ApiServer) -> None:
    """The CRDs, served when this returns."""
    server.kubectl("apply", "-f", str(CHART / "crds"))
    server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    for plural in ("loratrainingjobs", "loratrainingprofiles"):
        where = f"/apis/lora-operator.io/v1alpha1/{plural}"
        wait_until(plural, lambda where=where: server.api.get(where) is not None, 30)


def install_chart(server: ApiServer, values: Manifest) -> None:
    """CRDs, rights and profile of the chart; not its Deployment, as nothing here could run it."""
    install_crds(server)
    server.kubectl("create", "namespace", SYSTEM)
    manifests = render_chart(values, "serviceaccount.yaml", "rbac.yaml", "profile.yaml")
    server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))


def eventually(what: str, check: Callable[[], Any], timeout_seconds: float = 20.0) -> Any:
    """The first true value of `check`; an AssertionError with its last value when time is up."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not so after {timeout_seconds:.0f} s; last: {value!r}"
        time.sleep(0.05)


class Operator:
    """One operator process; a context that ends it."""

    def __init__(self, server: ApiServer, folder: Path, *arguments: str) -> None:
        self._server = server
        self._arguments = arguments
        self.log = folder / f"operator-{len(list(folder.glob('operator-*')))}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.metrics_port, self.liveness_port = free_ports(2)

    def start(self) -> Operator:
        """Starts it and returns once it is ready."""
        command = [sys.executable, "-m", "lora_operator.serve", f"--metrics-port={self.metrics_port}"]
        command += [f"--liveness-port={self.liveness_port}", *self._arguments]
        environment = {
            **os.environ,
            "KUBECONFIG": str(self._server.kubeconfig_of(ACCOUNT)),
            "POD_NAMESPACE": SYSTEM,
            "POD_NAME": "lora-operator-0",
        }
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        eventually("the operator is ready", lambda: self._dead() or self.get("/readyz")[0] == 200, 40)
        return self

    def _dead(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the operator exited with {self.process.returncode}:\n{self.text()}"
        return False

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Status code and body of its HTTP endpoint; code 0 when nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.metrics_port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def health(self) -> int:
        """Status code of the liveness probe."""
        return self.get("/healthz", self.liveness_port)[0]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == name and all(f'{key}="{text}"' in rest for key, text in labels.items()):
                total += float(value)
        return total

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Ends it as a lost node would."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def terminate(self, timeout_seconds: float = 25.0) -> int:
        """Ends it as the kubelet does; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_seconds)

    def __enter__(self) -> Operator:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None:
            sys.stderr.write(f"--- {self.log.name}\n{self.text()[-6000:]}\n")


class Hands:
    """What users, kubelets and controllers do in one namespace."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server, self.namespace = server, namespace

    def ask(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """The answer; an AssertionError with the server's words when it refuses."""
        code, answer = self.server.api.request(method, path, body, content_type)
        assert code < 300, json.dumps(answer)
        return answer

    def apply(self, job: Manifest) -> Manifest:
        """Creates a LoRATrainingJob."""
        return self.ask("POST", JOBS.format(self.namespace), job)

    def job(self, name: str) -> Manifest:
        """The LoRATrainingJob as it is; an empty object when there is none."""
        return self.server.api.get(f"{JOBS.format(self.namespace)}/{name}") or {}

    def status(self, name: str) -> Manifest:
        """Its status."""
        return self.job(name).get("status") or {}

    def condition(self, name: str, kind: str) -> Manifest:
        """One of its conditions."""
        return next((c for c in self.status(name).get("conditions", ()) if c["type"] == kind), {})

    def patch(self, name: str, patch: Manifest) -> Manifest:
        """Merges into the LoRATrainingJob."""
        return self.ask("PATCH", f"{JOBS.format(self.namespace)}/{name}", patch, STATUS_PATCH)

    def delete(self, name: str) -> None:
        """Deletes the LoRATrainingJob."""
        self.ask("DELETE", f"{JOBS.format(self.namespace)}/{name}")

    def clean_up(self) -> None:
        """No job is left, whatever holds it."""
        for job in self.ask("GET", JOBS.format(self.namespace))["items"]:
            if job["metadata"].get("finalizers"):
                self.patch(job["metadata"]["name"], {"metadata": {"finalizers": []}})
        for collection in (JOBS, BATCH):
            self.ask("DELETE", collection.format(self.namespace), {"propagationPolicy": "Background"})

    def children(self) -> list[Manifest]:
        """All batch/v1 Jobs."""
        return self.ask("GET", BATCH.format(self.namespace))["items"]

    def child(self, name: str) -> Manifest | None:
        """The batch/v1 Job of that name."""
        return self.server.api.get(f"{BATCH.format(self.namespace)}/{name}")

    def core(self, plural: str, name: str) -> Manifest | None:
        """A core/v1 object."""
        return self.server.api.get(f"{CORE.format(self.namespace)}{plural}/{name}")

    def events(self) -> list[tuple[str, str]]:
        """(reason, message) of all events."""
        items = self.ask("GET", CORE.format(self.namespace) + "events")["items"]
        return [(event["reason"], event["message"]) for event in items]

    def make_pod(self, child: Manifest, index: int = 0) -> str:
        """A pod as the Job controller makes it; returns its name."""
        template, meta = child["spec"]["template"], child["metadata"]
        name = f"{meta['name']}-{index}"
        spec = {**template["spec"], "hostname": name}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        metadata = {"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [owner]}
        metadata["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.ask("POST", CORE.format(self.namespace) + "pods", pod)
        return name

    def set_pod(self, name: str, **status: Any) -> None:
        """Writes a pod's status as the kubelet does."""
        self.ask("PATCH", f"{CORE.format(self.namespace)}pods/{name}/status", {"status": status}, STATUS_PATCH)

    def run_pod(self, name: str) -> None:
        """The pod's container runs."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        container = {"name": "trainer", "ready": True, "restartCount": 0, "image": "x", "imageID": "x"}
        self.set_pod(name, phase="Running", containerStatuses=[{**container, "state": {"running": {"startedAt": now}}}])

    def end_pod(self, name: str, code: int, message: str = "", reason: str = "Error") -> None:
        """The pod's container has ended."""
        container = {"name": "trainer", "ready": False, "restartCount": 0, "image": "x", "imageID": "x"}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"exitCode": code, "reason": reason, "message": message, "startedAt": now, "finishedAt": now}
        phase = "Succeeded" if code == 0 else "Failed"
        self.set_pod(name, phase=phase, containerStatuses=[{**container, "state": {"terminated": ended}}])

    def remove_pod(self, name: str) -> None:
        """The pod object goes, as the kubelet lets it when its containers have ended."""
        body = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        self.ask("DELETE", f"{CORE.format(self.namespace)}pods/{name}", body)

    def end_child(self, name: str, kind: str, reason: str, message: str = "") -> None:
        """The Job controller writes that a Job has ended; `kind` is Failed or Complete."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        before = {"Failed": "FailureTarget", "Complete": "SuccessCriteriaMet"}[kind]
        facts = {
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": now,
            "lastProbeTime": now,
        }
        status: Manifest = {"startTime": now, "conditions": [{"type": before, **facts}, {"type": kind, **facts}]}
        if kind == "Complete":
            status |= {"completionTime": now, "succeeded": 1, "completedIndexes": "0"}
        self.ask("PATCH", f"{BATCH.format(self.namespace)}/{name}/status", {"status": status}, STATUS_PATCH)


def child_of(team: Hands, name: str = "mascot-1") -> Manifest:
    """The child of that name, once it is there."""
    child: Manifest = eventually(f"child {name}", lambda: team.child(name))
    return child
