"""What is decided when memory ran out, from one look."""

from __future__ import annotations

import json

import pytest

from lora_api.job import ConditionType, JobStatus, Phase, Restarts, ShrunkStatus
from lora_operator.core.conditions import condition_of
from lora_operator.core.plan import plan
from lora_operator.core.views import Plan
from tests.unit.builders import ChildBuilder, JobBuilder, ObservedBuilder, PodBuilder, ProfileBuilder, RunBuilder, word
from tests.unit.core.test_plan_stories import reasons, status

SAID = word(86, "out of device memory while training step 151: CUDA out of memory", reason="OutOfDeviceMemory")
LOADING = SAID.model_copy(update={"shrink_helps": False})


def out_of_memory(
    job: JobBuilder | None = None,
    pod: PodBuilder | None = None,
    before: JobStatus | None = None,
    profile: ProfileBuilder | None = None,
    run: RunBuilder | None = None,
) -> Plan:
    """What follows when a running attempt has ended."""
    seen = ObservedBuilder(job, profile).with_status(before or status())
    seen = seen.with_child(ChildBuilder().failed(), pod or PodBuilder().ended(86, SAID))
    return plan(seen.with_run(run or RunBuilder().with_progress(150)).build())


def batches(size: int, **train: object) -> JobBuilder:
    return JobBuilder().with_config("train", batch_size=size, **train)


def message(decided: Plan, kind: ConditionType = ConditionType.INTERRUPTED) -> str:
    found = condition_of(decided.status, kind)
    assert found is not None
    assert found.status == "True"
    return found.message


def test_the_smaller_run_the_count_and_the_next_attempt_are_one_write() -> None:
    decided = out_of_memory(batches(4))
    assert decided.status.shrunk == ShrunkStatus(times=1, batch_size=2, gradient_accumulation=2)
    assert (decided.status.attempt, decided.status.restarts.out_of_memory) == (2, 1)
    assert (decided.status.retry_at, decided.create) == (None, ()), "it waits for nothing, and is written down first"
    assert reasons(decided) == ["Interrupted", "Shrunk"]
    assert decided.events[1].message == (
        "Attempt 2 trains batch_size 2 x gradient_accumulation 2 instead of batch_size 4 x gradient_accumulation 1; the samples "
        "of each step stay the same"
    )
    assert message(decided).startswith("The next attempts train batch_size 2 x gradient_accumulation 2 instead of")
    assert message(decided).endswith("Out of device memory while training step 151: CUDA out of memory")


def test_the_attempt_that_is_made_is_told_and_its_configuration_stays_what_it_was() -> None:
    job = batches(4)
    written = out_of_memory(job).status
    seen = ObservedBuilder(job).with_status(written).with_run(RunBuilder().with_progress(150))
    made = plan(seen.with_others([ChildBuilder(1).failed()]).build()).create
    run = json.loads(made[0]["data"]["run.json"])
    assert (run["attempt"], run["shrunk"]) == (2, 1)
    assert run["config"]["train"]["batch_size"] == 4
    assert run["config"]["train"]["gradient_accumulation"] == 1


def test_smaller_and_smaller_then_gradient_checkpointing_then_the_end_with_advice() -> None:
    before, seen = status(), []
    for _ in range(3):
        decided = out_of_memory(batches(2, gradient_accumulation=3), before=before)
        seen.append(decided.status.shrunk)
        before = status(shrunk=decided.status.shrunk, restarts=decided.status.restarts, restarts_total=1)
    assert seen[0] == ShrunkStatus(times=1, batch_size=1, gradient_accumulation=6)
    assert seen[1] == ShrunkStatus(times=2, batch_size=1, gradient_accumulation=6, gradient_checkpointing=True)
    assert decided.status.phase is Phase.FAILED
    assert decided.status.shrunk == seen[1], "it stays to be seen how far it went"
    text = message(decided, ConditionType.FAILED)
    assert text.startswith(
        "With batch_size 1 x gradient_accumulation 6, gradient_checkpointing nothing is left to make smaller"
    )
    for what in ("quantize", "datasets[].resolution", "network.linear", "GPU with more memory"):
        assert what in text


def test_making_it_smaller_does_not_use_up_the_retries_of_failures() -> None:
    shrunk = ShrunkStatus(times=3, batch_size=2, gradient_accumulation=8)
    before = status(shrunk=shrunk, restarts=Restarts(out_of_memory=3), restarts_total=3)
    assert out_of_memory(batches(16).with_policy(backoffLimit=0), before=before).status.attempt == 2
    failed = out_of_memory(batches(16).with_policy(backoffLimit=1), PodBuilder().ended(1), before)
    assert (failed.status.phase, failed.status.restarts.failure) == (Phase.INTERRUPTED, 1)
    again = status(shrunk=shrunk, restarts=failed.status.restarts, restarts_total=4)
    assert (
        out_of_memory(batches(16).with_policy(backoffLimit=1), PodBuilder().ended(1), again).status.phase
        is Phase.FAILED
    )


@pytest.mark.parametrize(
    "end", [PodBuilder().ended(85, word(85)).disrupted(), PodBuilder().ended(1)], ids=["preempted", "failed"]
)
def test_a_smaller_run_does_not_grow_back(end: PodBuilder) -> None:
    shrunk = ShrunkStatus(times=1, batch_size=2, gradient_accumulation=2)
    before = status(shrunk=shrunk, restarts=Restarts(out_of_memory=1), restarts_total=1)
    decided = out_of_memory(batches(4), end, before)
    assert (decided.status.attempt, decided.status.shrunk) == (2, shrunk)


def test_retry_tries_again_as_it_is_after_the_back_off_and_up_to_the_limit() -> None:
    job = batches(4).with_policy(oomPolicy="Retry", backoffLimit=1)
    decided = out_of_memory(job)
    assert (decided.status.shrunk, decided.status.restarts.out_of_memory) == (None, 1)
    assert decided.status.retry_at is not None
    assert message(decided).startswith("Set oomPolicy to Shrink, quantize")
    tried = status(restarts=Restarts(out_of_memory=1), restarts_total=1)
    assert out_of_memory(job, before=tried).status.phase is Phase.FAILED


def test_fail_fails_at_once_and_says_what_would_help() -> None:
    decided = out_of_memory(batches(4).with_policy(oomPolicy="Fail"))
    assert (decided.status.phase, decided.status.attempt) == (Phase.FAILED, 1)
    assert "set oomPolicy to Shrink" in message(decided, ConditionType.FAILED)
    assert reasons(decided) == ["Failed"]


def test_a_model_that_does_not_fit_is_not_trained_in_smaller_pieces() -> None:
    decided = out_of_memory(batches(4), PodBuilder().ended(86, LOADING))
    assert decided.status.shrunk is None
    assert decided.status.retry_at is not None, "another process may have had the memory"
    assert "oomPolicy" not in message(decided)
    assert message(decided).startswith("Quantize the base model")


def test_host_memory_is_not_saved_by_smaller_micro_batches_on_a_gpu() -> None:
    decided = out_of_memory(batches(4), PodBuilder().oom_killed())
    assert (decided.status.shrunk, decided.status.restarts.out_of_memory) == (None, 1)
    assert message(decided).startswith("Raise spec.resources.memory. Pod mascot-1-0-abcde was killed")


def test_on_a_cpu_the_hosts_memory_is_the_devices_once_the_training_has_begun() -> None:
    on_cpu = ProfileBuilder().with_sizing(gpusPerNode=0)
    trained = out_of_memory(batches(4), PodBuilder().oom_killed(), profile=on_cpu)
    assert trained.status.shrunk == ShrunkStatus(times=1, batch_size=2, gradient_accumulation=2)
    loading = RunBuilder().with_progress(0, stage="PreparingData")
    assert out_of_memory(batches(4), PodBuilder().oom_killed(), profile=on_cpu, run=loading).status.shrunk is None


def test_a_word_of_which_only_the_exit_code_is_left_shrinks_too() -> None:
    told = "Container trainer for pod team-a/mascot-1-0-x failed with exit code 86 matching FailJob rule at index 1"
    seen = ObservedBuilder(batches(4)).with_status(status()).with_run(RunBuilder().with_progress(150))
    assert plan(seen.seen(child=ChildBuilder().failed(told).build()).build()).status.shrunk is not None


def test_what_a_device_says_at_length_does_not_hide_what_is_done() -> None:
    long = SAID.model_copy(update={"message": "out of device memory: " + "GPU 0 has a total capacity of 79 GiB. " * 40})
    decided = out_of_memory(batches(4), PodBuilder().ended(86, long))
    assert "gradient_accumulation 2" in message(decided)
    assert len(message(decided)) <= 512
