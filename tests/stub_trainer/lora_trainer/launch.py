"""Speaks the run directory like the trainer, in milliseconds and without torch.

The environment says how it behaves: STUB_STEP_SECONDS; STUB_FAIL=STEP:CODE ends the first start there with that exit code
(STUB_FAIL_ALWAYS=1: every start); STUB_DEAF=1 ignores SIGTERM; STUB_ORPHAN=FILE starts a child in its own session and writes
its pid there.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lora_api import layout
from lora_api.exit_codes import reason_of
from lora_api.run import (
    CheckpointManifest,
    ExitWord,
    FileEntry,
    FinalManifest,
    Progress,
    RunConfig,
    RunFile,
    StartClaim,
    config_hash,
)
from lora_api.stores import credentials_from_folder, open_store

NOW = "2026-01-01T00:00:00Z"
STOPPED = threading.Event()


class Stub:
    def __init__(self):
        self.run = RunConfig.model_validate_json(Path(os.environ["LORA_RUN_CONFIG"]).read_text())
        credentials = None
        if self.run.store.type == "s3":
            credentials = credentials_from_folder(Path(os.environ["LORA_CREDENTIALS_DIR"]))
        self.store = open_store(self.run.store, credentials).sub(self.run.path)
        self.hash = config_hash(self.run.config)
        self.steps = self.run.config.train.steps
        self.start = 1 + max((int(o.key[len(layout.STARTS) :][:6]) for o in self.store.list(layout.STARTS)), default=0)
        self.step, self.resumed = 0, None

    def put(self, key, document):
        self.store.put(key, document.model_dump_json(by_alias=True).encode())

    def begin(self):
        if self.store.get(layout.RUN_FILE) is None:
            owner = RunFile(
                uid=self.run.uid,
                job_name=self.run.job_name,
                namespace=self.run.namespace,
                config_hash=self.hash,
                created_at=NOW,
            )
            self.put(layout.RUN_FILE, owner)
        claim = StartClaim(start=self.start, attempt=self.run.attempt, token="t", claimed_at=NOW)
        self.put(layout.start_claim(self.start), claim)
        manifests = [o.key for o in self.store.list(layout.CHECKPOINTS) if layout.is_checkpoint_manifest(o.key)]
        committed = [CheckpointManifest.model_validate_json(self.store.get(key)) for key in manifests]
        if committed:
            self.step = self.resumed = max(manifest.step for manifest in committed)
        self.beat("Training")

    def beat(self, stage, word=None):
        progress = Progress(
            start=self.start,
            attempt=self.run.attempt,
            stage=stage,
            step=self.step,
            steps=self.steps,
            loss=1 / (1 + self.step),
            learning_rate=1e-4,
            steps_per_second=10.0,
            eta_seconds=(self.steps - self.step) / 10,
            resumed_from_step=self.resumed,
            updated_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            exit=word,
        )
        self.put(layout.PROGRESS, progress)

    def save(self):
        folder = layout.checkpoint_folder(self.step, self.start)
        self.store.put(folder + "adapter.safetensors", b"x" * 100)
        manifest = CheckpointManifest(
            step=self.step,
            start=self.start,
            attempt=self.run.attempt,
            uid=self.run.uid,
            config_hash=self.hash,
            committed_at=NOW,
            files=(FileEntry(name="adapter.safetensors", size_bytes=100, sha256="0" * 64),),
        )
        self.put(folder + layout.MANIFEST, manifest)

    def finish(self):
        self.store.put(layout.FINAL + "adapter.safetensors", b"final")
        final = FinalManifest(
            step=self.step,
            start=self.start,
            uid=self.run.uid,
            config_hash=self.hash,
            completed_at=NOW,
            adapter="adapter.safetensors",
            samples=("00.png",),
            files=(FileEntry(name="adapter.safetensors", size_bytes=5, sha256="0" * 64),),
        )
        self.put(layout.FINAL_MANIFEST, final)

    def leave(self, code, message):
        word = ExitWord(code=code, reason=reason_of(code), message=message, step=self.step)
        if code in (0, 64, 65, 66, 75, 77, 85, 86, 87):
            Path(os.environ["LORA_TERMINATION_LOG"]).write_text(word.model_dump_json(by_alias=True) + "\n")
            self.beat("Training", word)
        print(f"stub leaves with {code}: {message}", flush=True)
        sys.exit(code)


def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("STUB_DEAF") else lambda *_: STOPPED.set())
    stub = Stub()
    if orphan := os.environ.get("STUB_ORPHAN"):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(orphan).write_text(str(child.pid))
    if os.environ["JOB_COMPLETION_INDEX"] != "0":
        STOPPED.wait()
        stub.leave(85, "a follower was stopped")
    fail_step, _, fail_code = os.environ.get("STUB_FAIL", "").partition(":")
    print(json.dumps({"argv": sys.argv[1:], "start": stub.start}), flush=True)
    stub.begin()
    while stub.step < stub.steps:
        if STOPPED.is_set():
            stub.save()
            stub.leave(85, "asked to stop")
        if fail_step and stub.step >= int(fail_step) and (stub.start == 1 or os.environ.get("STUB_FAIL_ALWAYS")):
            stub.leave(int(fail_code), "failed on purpose")
        time.sleep(float(os.environ.get("STUB_STEP_SECONDS", "0.01")))
        stub.step += 1
        if stub.step % stub.run.config.save.save_every == 0:
            stub.save()
        stub.beat("Training")
    stub.finish()
    stub.leave(0, "done")


if __name__ == "__main__":
    main()
