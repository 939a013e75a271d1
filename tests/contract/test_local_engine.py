"""The local engine keeps what Kubernetes promises: volumes, signals, grace, exit codes, conditions, and nothing left behind."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lora_api import names
from lora_api.exit_codes import ExitCode
from lora_operator.adapters.clock import SystemClock
from lora_operator.adapters.local import LocalCluster
from lora_operator.adapters.local_pods import Machine
from lora_operator.adapters.local_state import LocalState, Objects
from lora_operator.core.read import attempt_of, child_view, pod_view
from lora_operator.core.views import Event, EventType, JobKey
from tests.local_runs import eventually, is_alive

KEY, UID = JobKey("default", "stub"), "uid-1"
JOB = {
    "apiVersion": "lora-operator.io/v1alpha1",
    "kind": "LoRATrainingJob",
    "metadata": {"name": "stub", "namespace": "default", "uid": UID, "resourceVersion": "1", "generation": 1},
    "spec": {},
}
PROFILE = {"kind": "LoRATrainingProfile", "metadata": {"name": "default"}, "spec": {}}


def shell(script: str, **spec: Any) -> dict[str, Any]:
    """A child Job that runs a shell script."""
    return python_or_shell(["/bin/sh", "-c", script], **spec)


def python_or_shell(
    command: list[str],
    *,
    completions: int = 1,
    grace: int = 30,
    env: dict[str, str] | None = None,
    mounts: dict[str, tuple[str, dict[str, Any]]] | None = None,
    limits: dict[str, Any] | None = None,
) -> dict[str, Any]:
    labels = {names.LABEL_JOB_UID: UID, names.LABEL_ATTEMPT: "1"}
    mounts = mounts or {}
    container = {
        "name": names.TRAINER_CONTAINER,
        "command": command,
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in mounts.items()],
        "resources": {"limits": limits or {}},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "stub-1",
            "namespace": "default",
            "labels": labels,
            "ownerReferences": [{"kind": "LoRATrainingJob", "name": "stub", "uid": UID}],
        },
        "spec": {
            "completions": completions,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [65, 85]},
                    },
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": grace,
                    "containers": [container],
                    "volumes": [{"name": name, **source} for name, (_, source) in mounts.items()],
                },
            },
        },
    }


class Engine:
    """A local cluster in a folder."""

    def __init__(self, folder: Path, **machine: Any) -> None:
        self.folder = folder
        self.state = LocalState(folder / "state")
        self.state.folder.mkdir(parents=True)
        self.machine = Machine(cache=folder / "cache", **machine)
        self.cluster = LocalCluster(
            self.state, Objects(dict(JOB)), profile=PROFILE, clock=SystemClock(), machine=self.machine
        )

    async def run(self, manifest: dict[str, Any]) -> None:
        """Creates the Job and waits for its end."""
        assert await self.cluster.create(manifest)
        await asyncio.wait_for(self.cluster.join(), 30)

    async def until(self, look: Any, what: str) -> Any:
        """Polls without blocking the engine."""
        return await asyncio.to_thread(eventually, look, what)

    async def pods(self) -> list[dict[str, Any]]:
        return await self.cluster.read_pods(KEY, UID)

    async def views(self) -> list[Any]:
        return [pod_view(pod, datetime(2030, 1, 1, tzinfo=UTC)) for pod in await self.pods()]

    async def child(self) -> Any:
        return child_view(await self.cluster.read_child("default", "stub-1"), UID)

    def log(self) -> str:
        return "".join(path.read_text() for path in self.state.logs.glob("*.log"))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


async def test_a_process_that_ends_well_completes_the_job(engine):
    await engine.run(shell("echo hello"))
    (pod,) = await engine.views()
    child = await engine.child()
    assert (pod.phase, pod.exit_code, pod.index) == ("Succeeded", 0, 0)
    assert child.complete
    assert child.finished
    assert engine.log() == "hello\n"


async def test_the_pod_carries_the_labels_by_which_the_operator_finds_it(engine):
    await engine.run(shell("true"))
    (pod,) = await engine.pods()
    assert attempt_of(pod) == 1
    assert await engine.cluster.read_pods(KEY, "another-uid") == []


async def test_exit_code_and_termination_message_are_the_containers(engine):
    word = '{"code": 65, "reason": "InvalidData", "message": "no pictures", "step": 0}'
    await engine.run(
        shell(f"echo '{word}' > $LORA_TERMINATION_LOG; exit 65", env={"LORA_TERMINATION_LOG": "/dev/termination-log"})
    )
    (pod,) = await engine.views()
    child = await engine.child()
    assert (pod.phase, pod.exit_code) == ("Failed", 65)
    assert pod.word.message == "no pictures"
    assert "failed with exit code 65 matching FailJob rule at index 1" in child.failed


async def test_a_failure_without_a_word_leaves_the_end_of_its_log(engine):
    await engine.run(shell("echo the reason; exit 3"))
    (pod,) = await engine.pods()
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "the reason\n"
    assert (await engine.child()).failed == "Job has reached the specified backoff limit"


async def test_a_process_that_is_killed_has_128_plus_the_signal_as_exit_code(engine):
    await engine.run(shell("kill -9 $$$$"))  # Kubernetes makes one dollar sign of two
    assert [pod.exit_code for pod in await engine.views()] == [137]


async def test_a_command_that_does_not_exist_ends_the_pod_and_says_so(engine):
    await engine.run(python_or_shell(["/no/such/program"]))
    assert [pod.exit_code for pod in await engine.views()] == [127]
    assert "/no/such/program: No such file or directory" in engine.log()


async def test_deleting_the_job_terminates_its_processes_and_takes_the_pods_away(engine):
    await engine.cluster.create(shell("trap 'echo saved; exit 85' TERM; echo ready; while :; do sleep 0.05; done"))
    await engine.until(lambda: "ready" in engine.log(), "the process")
    child = await engine.cluster.read_child("default", "stub-1")
    await engine.cluster.delete_child("default", "stub-1", "another-uid")
    assert await engine.cluster.read_child("default", "stub-1") is not None, "only with the right uid"
    await engine.cluster.delete_child("default", "stub-1", child["metadata"]["uid"])
    assert await engine.cluster.read_child("default", "stub-1") is None
    assert [pod.terminating for pod in await engine.views()] == [True]
    await asyncio.wait_for(engine.cluster.join(), 10)
    assert await engine.pods() == []
    assert "saved" in engine.log()


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period(engine):
    await engine.cluster.create(shell("trap '' TERM; echo ready; while :; do sleep 0.05; done", grace=1))
    await engine.until(lambda: "ready" in engine.log(), "the process")
    assert engine.cluster.preempt("the place is needed") == 1
    await asyncio.wait_for(engine.cluster.join(), 10)
    (pod,) = await engine.views()
    assert pod.exit_code == 137


async def test_a_preempted_pod_says_who_wanted_its_place_and_fails_the_job(engine):
    await engine.cluster.create(shell("trap 'exit 85' TERM; echo ready; while :; do sleep 0.05; done"))
    await engine.until(lambda: "ready" in engine.log(), "the process")
    engine.cluster.preempt("the place is needed")
    await asyncio.wait_for(engine.cluster.join(), 10)
    (pod,) = await engine.views()
    child = await engine.child()
    assert (pod.exit_code, pod.disrupted) == (ExitCode.PREEMPTED, "the place is needed")
    assert "has condition DisruptionTarget" in child.failed


async def test_when_one_index_fails_the_others_are_terminated(engine):
    script = "if [ $JOB_COMPLETION_INDEX = 1 ]; then exit 65; fi; trap 'exit 85' TERM; while :; do sleep 0.05; done"
    await engine.run(shell(script, completions=2))
    assert [(pod.index, pod.exit_code) for pod in await engine.views()] == [(1, 65)]
    assert "exit code 65" in (await engine.child()).failed


async def test_whatever_a_pod_started_ends_with_it(engine):
    pid_file = engine.folder / "pid"
    await engine.run(shell(f"setsid sleep 1000 & echo $! > {pid_file}; exit 0"))
    assert not is_alive(int(pid_file.read_text()))


async def test_references_in_command_and_environment_are_expanded_as_kubernetes_does(engine):
    env = {"FIRST": "one", "SECOND": "$(FIRST)-two", "THIRD": "$$(FIRST) $(UNKNOWN)"}
    command = ["/bin/sh", "-c", 'echo "$0 $SECOND $THIRD"', "--node-rank=$(JOB_COMPLETION_INDEX)"]
    await engine.run(python_or_shell(command, env=env))
    assert engine.log() == "--node-rank=0 one-two $(FIRST) $(UNKNOWN)\n"


async def test_configuration_secrets_and_scratch_folders_are_where_the_environment_says(tmp_path):
    engine = Engine(tmp_path, secrets={"creds": {"accessKey": "me", "secretKey": "hush"}})
    config_map = {"kind": "ConfigMap", "metadata": {"name": "stub-1"}, "data": {"run.json": "{}"}}
    assert await engine.cluster.create(config_map)
    assert not await engine.cluster.create(config_map), "it is there already"
    mounts = {
        "run": ("/etc/lora-run", {"configMap": {"name": "stub-1"}}),
        "credentials": ("/etc/lora-credentials", {"secret": {"secretName": "creds"}}),
        "cache": ("/cache", {"emptyDir": {}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
    }
    env = {
        "CONFIG": "/etc/lora-run/run.json",
        "KEYS": "/etc/lora-credentials",
        "LORA_CACHE_DIR": "/cache",
        "HOME": "/tmp",
    }
    script = "cat $CONFIG $KEYS/accessKey; stat -c %a $KEYS/secretKey; touch $LORA_CACHE_DIR/kept $HOME/lost"
    await engine.run(shell(script, env=env, mounts=mounts))
    assert engine.log() == "{}me600\n"
    assert (tmp_path / "cache/kept").exists(), "latents are used again by the next run"
    assert list((tmp_path / "state/pods").iterdir()) == [], "credentials do not outlive the pod"
    assert await engine.cluster.secret_keys("default", "creds") == {"accessKey", "secretKey"}


async def test_the_users_own_keys_are_not_handed_to_the_trainer(engine, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("MINIO_ROOT_PASSWORD", "hush")
    await engine.run(shell("env"))
    assert "hush" not in engine.log()


async def test_nodes_meet_on_this_machine_at_a_port_that_is_free(engine):
    command = [
        "python3",
        "-c",
        "import sys; print(sys.executable, *sys.argv[1:])",
        "--master-addr=stub-1-0.stub-1",
        "--master-port=29500",
    ]
    await engine.run(python_or_shell(command, completions=2))
    first, second = engine.log().splitlines()
    assert first == second
    program, address, port = first.split()
    assert (program, address) == (sys.executable, "--master-addr=127.0.0.1")
    assert port != "--master-port=29500"


async def test_gpus_are_dealt_out_to_the_pods(tmp_path):
    engine = Engine(tmp_path, gpus=("0", "1", "2", "3"))
    script = "echo $JOB_COMPLETION_INDEX: $CUDA_VISIBLE_DEVICES"
    await engine.run(shell(script, completions=2, limits={"nvidia.com/gpu": 2, "memory": "1Gi"}))
    assert sorted(engine.log().splitlines()) == ["0: 0,1", "1: 2,3"]


async def test_a_child_that_asks_for_no_gpu_sees_none(tmp_path):
    engine = Engine(tmp_path, gpus=("0",))
    await engine.run(shell('echo "[$CUDA_VISIBLE_DEVICES]"'))
    assert engine.log() == "[]\n"


async def test_the_status_is_written_only_by_whoever_has_seen_the_newest(engine):
    job = await engine.cluster.read_job(KEY)
    assert await engine.cluster.write_status(job, {"phase": "Running"})
    assert not await engine.cluster.write_status(job, {"phase": "Failed"}), "the version has moved on"
    again = await engine.cluster.read_job(KEY)
    assert again["status"] == {"phase": "Running"}
    assert await engine.cluster.write_finalizers(again, ("a/b",))
    assert (await engine.cluster.read_job(KEY))["metadata"]["finalizers"] == ["a/b"]


async def test_what_was_read_is_a_copy(engine):
    job = await engine.cluster.read_job(KEY)
    job["metadata"]["name"] = "changed"
    assert (await engine.cluster.read_job(KEY))["metadata"]["name"] == "stub"


async def test_other_jobs_profiles_and_children_are_not_there(engine):
    assert await engine.cluster.read_job(JobKey("default", "other")) is None
    assert await engine.cluster.read_profile("other") is None
    assert await engine.cluster.read_child("default", "other") is None
    assert await engine.cluster.secret_keys("default", "other") is None


async def test_objects_and_events_are_saved_as_they_change(engine):
    await engine.cluster.emit(JOB, Event(EventType.NORMAL, "Created", "attempt 1"))
    await engine.run(shell("exit 65"))
    saved = engine.state.load()
    assert saved.pods[0]["status"]["phase"] == "Failed"
    assert saved.children[0]["status"]["conditions"][-1]["type"] == "Failed"
    assert [event["reason"] for event in engine.state.events()] == ["Created"]


async def test_a_state_folder_that_can_not_be_written_is_news_and_no_crash(engine):
    said = []
    engine.cluster._on_event = said.append
    engine.state.folder.rename(engine.folder / "moved")
    await engine.cluster.write_status(await engine.cluster.read_job(KEY), {"phase": "Running"})
    assert [event.reason for event in said] == ["StateNotSaved"]
