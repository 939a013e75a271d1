"""A trainer, as far as an operator can see it: it moves some steps whenever a test says so."""

from __future__ import annotations

from typing import Any

from lora_api import layout, names
from lora_api.exit_codes import ExitCode, reason_of
from lora_api.run import CheckpointManifest, ExitWord, FileEntry, FinalManifest, Progress, RunFile
from lora_operator.core.views import Manifest
from tests.unit.fake_kubernetes import Kubernetes
from tests.unit.fakes import FakeClock, MemoryStore


class Trainer:
    """What the pods of a start do, as far as an operator can see it. Saves every 100 steps when it is asked to move."""

    def __init__(self, store: MemoryStore, kubernetes: Kubernetes, clock: FakeClock, *, uid: str, steps: int) -> None:
        self.store, self.kubernetes, self.clock, self.uid, self.steps = store, kubernetes, clock, uid, steps
        self.start, self.attempt, self.step, self.lost = 0, 0, 0, 0
        self.resumed: int | None = None
        self._pod = ""
        self.stride = 50  # steps of one move
        self.saves = True  # when it is asked to stop
        self.hangs = False

    def move(self) -> None:
        """Goes on by some steps in the pod that runs; leaves when it is asked to, or done."""
        pods = self.kubernetes.pods()
        reachable = [pod for pod in pods if pod["spec"].get("nodeName") not in self.kubernetes.lost_nodes]
        running = [pod for pod in reachable if pod["status"]["phase"] == "Running"]
        for pod in [pod for pod in running if "deletionTimestamp" in pod["metadata"]]:
            self._asked_to_stop(pod)
        running = [pod for pod in running if "deletionTimestamp" not in pod["metadata"]]
        if not running or self.hangs:
            return
        lead = running[0]
        if lead["metadata"]["name"] != self._pod:
            self._begin(lead)
        elif self.step < self.steps:
            self.step += self.stride
            self.beat("Training")
            if self.step % 100 == 0:
                self.save()
        else:
            self.finish()
            for pod in running:
                self.kubernetes.end_pod(pod, 0, self._word(ExitCode.DONE))

    def _begin(self, pod: Manifest) -> None:
        self._pod = pod["metadata"]["name"]
        self.attempt = int(pod["metadata"]["labels"][names.LABEL_ATTEMPT])
        self.start += 1
        if self.store.get(layout.RUN_FILE) is None:
            owner = RunFile(
                uid=self.uid, job_name="mascot", namespace="team-a", config_hash="c", created_at=self.clock.text()
            )
            self._put(layout.RUN_FILE, owner)
        keys = [item.key for item in self.store.list(layout.CHECKPOINTS)]
        steps = [int(key.split("step-")[1][:9]) for key in keys if layout.is_checkpoint_manifest(key)]
        newest = max(steps, default=None)
        self.lost += max(0, self.step - (newest or 0))
        self.step, self.resumed = newest or 0, newest
        self.beat("Initializing")

    def _asked_to_stop(self, pod: Manifest) -> None:
        if pod["metadata"]["name"] == self._pod and self.saves:
            self.save()
            self.beat("Training", end=self._word(ExitCode.PREEMPTED))
        self.kubernetes.end_pod(
            pod, int(ExitCode.PREEMPTED) if self.saves else 137, self._word(ExitCode.PREEMPTED) if self.saves else None
        )

    def beat(self, stage: str, *, end: ExitWord | None = None, **changes: Any) -> None:
        """A heartbeat."""
        fields: dict[str, Any] = {
            "start": self.start,
            "attempt": self.attempt,
            "stage": stage,
            "step": self.step,
            "steps": self.steps,
            "loss": 1.0,
            "eta_seconds": float(self.steps - self.step),
            "resumed_from_step": self.resumed,
            "lost_steps": self.lost,
            "updated_at": self.clock.text(),
            "exit": end,
        }
        self._put(layout.PROGRESS, Progress(**{**fields, **changes}))

    def save(self) -> None:
        """Commits a checkpoint."""
        folder = layout.checkpoint_folder(self.step, self.start)
        self.store.put(folder + "adapter.safetensors", b"x" * 10)
        manifest = CheckpointManifest(
            step=self.step,
            start=self.start,
            attempt=self.attempt,
            uid=self.uid,
            config_hash="c",
            committed_at=self.clock.text(),
            files=(FileEntry(name="adapter.safetensors", size_bytes=10, sha256="00"),),
        )
        self._put(folder + layout.MANIFEST, manifest)

    def finish(self) -> None:
        """Commits the result."""
        self.beat("Finalizing", end=self._word(ExitCode.DONE))
        manifest = FinalManifest(
            step=self.step,
            start=self.start,
            uid=self.uid,
            config_hash="c",
            completed_at=self.clock.text(),
            adapter="mascot.safetensors",
        )
        self._put(layout.FINAL_MANIFEST, manifest)

    def _word(self, code: ExitCode) -> ExitWord:
        return ExitWord(code=int(code), reason=reason_of(code), message=f"left at step {self.step}", step=self.step)

    def _put(self, key: str, document: Any) -> None:
        self.store.put(key, document.model_dump_json(by_alias=True).encode())
