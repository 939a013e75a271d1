"""`lora-operator run` as a user sees it: a process, its output, its exit code. The trainer is a stub that takes milliseconds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.s3 import SeaweedS3
from tests.cluster.settings import S3_ACCESS_KEY, S3_SECRET_KEY
from tests.local_runs import Workbench, eventually, interrupt, is_alive, job_manifest

SLOW = {"STUB_STEP_SECONDS": "0.05"}  # a run of three seconds: long enough to disturb it


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    workbench = Workbench(tmp_path)
    yield workbench
    workbench.clear()


def test_a_run_ends_with_the_adapter_and_says_how_to_load_it(bench):
    code, output = bench.call("run", "job.yaml")
    assert code == 0
    assert (bench.run / "final/adapter.safetensors").exists()
    assert f'pipe.load_lora_weights("{bench.run}/final/adapter.safetensors")' in output
    assert "samples" in output
    assert bench.committed() == [40, 50, 60], "max_step_saves is 3"


def test_a_preemption_on_purpose_costs_no_steps_and_is_said(bench):
    code, output = bench.call("run", "job.yaml", "--preempt-at", "20", "--write-status", "out/s.json", **SLOW)
    assert code == 0
    assert "--preempt-at 20" in output
    assert "restarts: 1 preemption." in output
    job = json.loads((bench.folder / "out/s.json").read_text())
    assert job["status"]["phase"] == "Succeeded"
    assert job["status"]["attempt"] == 2
    assert job["status"]["restarts"]["preemption"] == 1
    assert job["status"]["lostSteps"] == 0
    assert job["status"]["progress"]["resumedFromStep"] >= 20


def test_running_a_job_that_has_succeeded_says_so_and_runs_nothing(bench):
    bench.call("run", "job.yaml")
    starts = list(bench.run.glob("starts/*"))
    code, output = bench.call("run", "job.yaml", "--write-status", "s.yaml")
    assert code == 0
    assert "has already succeeded (60 steps)" in output
    assert list(bench.run.glob("starts/*")) == starts
    assert yaml.safe_load((bench.folder / "s.yaml").read_text())["status"]["phase"] == "Succeeded"


def test_ctrl_c_saves_and_stops_and_the_same_command_goes_on(bench):
    process = bench.start("run", "job.yaml", **SLOW)
    eventually(lambda: bench.step() >= 5, "five steps")
    output = interrupt(process, signal.SIGINT)
    assert process.returncode == 130
    saved = bench.committed()[-1]
    assert f"saved at step {saved}." in output
    assert "Go on with: lora-operator run job.yaml" in output
    assert bench.objects()["job"]["status"]["phase"] == "Suspended"

    code, output = bench.call("run", "job.yaml")
    assert code == 0
    assert f"going on from the checkpoint of step {saved}" in output
    assert "restarts" not in output, "a pause is not a restart"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_a_closed_terminal_do_the_same_with_their_own_exit_codes(bench, number, code):
    process = bench.start("run", "job.yaml", **SLOW)
    eventually(lambda: bench.step() >= 2, "two steps")
    interrupt(process, number)
    assert process.returncode == code
    assert bench.committed()


def test_a_reader_that_goes_away_does_not_end_the_training(bench):
    process = bench.start("run", "job.yaml", **SLOW)
    process.stdout.close()
    process.wait(60)
    assert (bench.run / "final/manifest.json").exists()


def test_a_second_ctrl_c_kills_a_trainer_that_does_not_listen(bench):
    process = bench.start("run", "job.yaml", STUB_DEAF="1", **SLOW)
    eventually(lambda: bench.step() >= 2, "two steps")
    _, trainer = bench.pids()
    process.send_signal(signal.SIGINT)
    eventually(bench.is_suspending, "the first signal to be taken")
    output = interrupt(process, signal.SIGINT)
    assert process.returncode == 130
    assert not is_alive(trainer)
    assert "Stopped" in output


def test_a_trainer_that_is_killed_is_started_again_from_its_newest_checkpoint(bench):
    process = bench.start("run", "job.yaml", **SLOW)
    eventually(lambda: bench.step() >= 12, "a checkpoint")
    os.kill(bench.pids()[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "exit code 137 (signal 9)" in output
    assert "Resumed from the checkpoint of step 10" in output


def test_the_trainer_does_not_outlive_a_killed_lora_operator_and_the_next_run_goes_on(bench):
    process = bench.start("run", "job.yaml", **SLOW)
    eventually(lambda: bench.step() >= 5, "five steps")
    shim, trainer = bench.pids()
    process.kill()
    process.communicate(timeout=60)
    eventually(lambda: not is_alive(trainer) and not is_alive(shim), "the trainer to save and leave")
    saved = bench.committed()[-1]
    assert saved >= 5

    code, output = bench.call("status", "job.yaml")
    assert code == 0
    assert "Running when its lora-operator ended" in output
    code, output = bench.call("run", "job.yaml")
    assert code == 0
    assert f"lora-operator was stopped; saved at step {saved}" in output


def test_a_run_that_finds_a_trainer_of_a_killed_run_alive_ends_it_first(bench):
    process = bench.start("run", "job.yaml", STUB_DEAF="1", **SLOW)
    eventually(lambda: bench.step() >= 2, "two steps")
    shim, trainer = bench.pids()
    record = next(bench.state.glob("pods/*/process.json"))
    os.kill(shim, signal.SIGSTOP)  # so that it can't end the trainer by itself
    process.kill()
    process.communicate(timeout=60)
    short = json.loads(record.read_text()) | {"graceSeconds": 0.2}
    record.write_text(json.dumps(short))
    code, output = bench.call("run", "job.yaml")
    assert code == 0
    assert "the run before this one was killed" in output
    assert not is_alive(trainer)
    assert not is_alive(shim)


def test_two_runs_of_one_job_at_the_same_time_are_refused(bench):
    process = bench.start("run", "job.yaml", **SLOW)
    eventually(bench.pids, "the trainer")
    code, output = bench.call("run", "job.yaml")
    assert code == 1
    assert f"is being run already by process {process.pid}" in output
    interrupt(process, signal.SIGTERM)


def test_bad_data_fails_at_once_with_the_trainers_own_words_and_its_log(bench):
    code, output = bench.call("run", "job.yaml", STUB_FAIL="5:65", STUB_FAIL_ALWAYS="1")
    assert code == 1
    assert "default/stub: Failed: InvalidData: failed on purpose" in output
    assert "stub leaves with 65" in output, "the last lines of the log"
    assert len(list(bench.run.glob("starts/*"))) == 1


def test_after_a_failure_the_same_command_begins_another_try_from_the_newest_checkpoint(bench):
    code, _ = bench.call("run", "job.yaml", STUB_FAIL="25:65")
    assert code == 1
    code, output = bench.call("run", "job.yaml", **SLOW)
    assert code == 0
    assert "trying again: the last try failed (InvalidData)" in output
    assert "Resumed from the checkpoint of step 20" in output


def test_a_changed_field_that_defines_the_run_is_named_and_refused(bench):
    bench.call("run", "job.yaml", STUB_FAIL="5:65")
    bench.write(job_manifest(train__seed=7))
    code, output = bench.call("run", "job.yaml")
    assert code == 1
    assert "spec.config.train.seed: is 7, but the run was begun with 42" in output


def test_more_steps_are_taken_over_by_a_run_that_goes_on(bench):
    bench.call("run", "job.yaml", STUB_FAIL="25:65")
    bench.write(job_manifest(train__steps=70))
    assert bench.call("run", "job.yaml")[0] == 0
    assert bench.committed()[-1] == 70
    assert bench.objects()["job"]["metadata"]["generation"] == 2


def test_removing_the_run_directory_begins_anew(bench):
    bench.call("run", "job.yaml")
    for path in sorted(bench.run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, output = bench.call("run", "job.yaml")
    assert code == 0
    assert "is gone: beginning anew" in output


def test_logs_and_status_are_there_after_the_run(bench):
    bench.call("run", "job.yaml")
    assert "stub leaves with 0" in bench.call("logs", "job.yaml")[1]
    assert "stub leaves with 0" in bench.call("logs", "job.yaml", "--follow")[1]
    output = bench.call("status", "job.yaml")[1]
    assert output.startswith("default/stub: Succeeded")
    assert "60/60 (100%)" in output


def test_two_nodes_meet_on_one_machine_and_end_together(bench):
    manifest = job_manifest()
    manifest["spec"]["resources"] = {"nodes": 2, "gpusPerNode": 0}
    bench.write(manifest)
    process = bench.start("run", "job.yaml", "--preempt-at", "10", **SLOW)
    eventually(lambda: len(list(bench.state.glob("pods/*/process.json"))) == 2, "two pods")
    output, _ = process.communicate(timeout=60)
    assert "Preempted" in output or "preempted on purpose" in output
    assert process.returncode == 0


def test_a_run_directory_of_another_job_is_not_touched(bench):
    manifest = job_manifest()
    manifest["spec"]["output"] = {"path": "shared"}
    bench.write(manifest)
    assert bench.call("run", "job.yaml")[0] == 0
    manifest["metadata"]["name"] = "other"
    bench.write(manifest)
    code, output = bench.call("run", "job.yaml")
    assert code == 1
    assert "default/other: Invalid: " in output
    assert "default/stub" in output, "whose it is"


def keys_below(s3, prefix):
    return [item.object_name for item in s3.client.list_objects(bucket_name="runs", prefix=prefix, recursive=True)]


def test_a_run_into_an_s3_store_keeps_its_keys_out_of_the_environment(bench):
    with SeaweedS3(buckets=["runs"]) as s3:
        keys = {"AWS_ACCESS_KEY_ID": S3_ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY}
        store = ("--store", "s3://runs/team", "--endpoint", s3.endpoint)
        process = bench.start("run", "job.yaml", *store, **SLOW, **keys)
        eventually(lambda: keys_below(s3, "team/default/stub/starts/"), "the first start")
        output = interrupt(process, signal.SIGINT)
        assert process.returncode == 130, output
        code, output = bench.call("run", "job.yaml", *store, **keys)
        assert code == 0, output
        assert "team/default/stub/final/adapter.safetensors" in keys_below(s3, "team/")
        assert "s3://runs/team/default/stub/final/adapter.safetensors" in output
    assert list((bench.folder / "state").rglob("secretKey")) == []
