"""The work queue: what is due when, and what runs at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from lora_operator.ports import ClusterError
from lora_operator.workqueue import Backoff, Schedule, WorkQueue


def schedule(**backoff: float) -> Schedule[str]:
    return Schedule(Backoff(jitter=lambda: 0.0, **backoff))


# --- the schedule, with time as an argument


def test_a_key_is_begun_once_however_often_it_was_added() -> None:
    queue = schedule()
    queue.add("a", 1.0)
    queue.add("a", 1.0)
    assert queue.begin(1.0) == "a"
    queue.end("a", 1.0)
    assert queue.begin(9.0) is None


def test_keys_are_begun_in_the_order_in_which_they_are_due() -> None:
    queue = schedule()
    for key, at in (("late", 3.0), ("early", 1.0), ("first", 2.0), ("second", 2.0)):
        queue.add(key, at)
    assert [queue.begin(9.0) for _ in range(4)] == ["early", "first", "second", "late"]


def test_nothing_is_begun_before_it_is_due() -> None:
    queue = schedule()
    queue.add("a", 5.0)
    assert queue.begin(4.9) is None
    assert queue.next_at() == 5.0
    assert queue.begin(5.0) == "a"


def test_of_several_wishes_the_earliest_wins() -> None:
    queue = schedule()
    queue.add("a", 5.0)
    queue.add("a", 2.0)
    queue.add("a", 9.0)
    assert queue.next_at() == 2.0
    assert queue.begin(2.0) == "a"
    queue.end("a", 2.0)
    assert queue.next_at() is None, "the later wishes are met by the earlier work"


def test_a_key_that_runs_is_not_begun_again_but_comes_after_its_end() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    assert queue.begin(0.0) == "a"
    queue.add("a", 1.0)
    assert queue.begin(2.0) is None
    assert queue.next_at() is None
    queue.end("a", 3.0)
    assert queue.begin(3.0) == "a"


def test_work_that_asks_comes_back_and_a_wake_comes_before_that() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.begin(0.0)
    queue.end("a", 1.0, again_after_seconds=10.0)
    assert queue.next_at() == 11.0
    queue.add("a", 2.0)
    assert queue.next_at() == 2.0


def test_failures_wait_twice_as_long_each_time_up_to_the_maximum() -> None:
    queue = schedule(initial_seconds=1.0, max_seconds=5.0)
    waits = []
    now = 0.0
    queue.add("a", now)
    for _ in range(5):
        assert queue.begin(now) == "a"
        waits.append(queue.fail("a", now))
        now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_success_ends_the_back_off() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.begin(0.0)
    queue.fail("a", 0.0)
    queue.begin(1.0)
    queue.end("a", 1.0)
    queue.add("a", 1.1)
    assert queue.begin(1.1) == "a"
    assert queue.fail("a", 1.1) == 1.0


def test_jitter_shortens_a_wait_by_at_most_a_half() -> None:
    assert Backoff(initial_seconds=8.0, jitter=lambda: 0.0).seconds(1) == 8.0
    assert Backoff(initial_seconds=8.0, jitter=lambda: 1.0).seconds(1) == 4.0
    assert Backoff(max_seconds=60.0, jitter=lambda: 0.0).seconds(10_000) == 60.0


def test_a_failing_key_that_wakes_itself_is_held_to_its_first_back_off() -> None:
    queue = schedule(initial_seconds=1.0, max_seconds=60.0)
    queue.add("a", 0.0)
    queue.begin(0.0)
    queue.add("a", 0.0)  # a trace of its own work
    queue.fail("a", 0.0)
    assert queue.begin(0.5) is None
    queue.add("a", 0.6)
    assert queue.next_at() == 1.0
    assert queue.begin(1.0) == "a"
    queue.fail("a", 1.0)
    assert queue.next_at() == 3.0, "nobody woke it: the back-off is two seconds now"
    queue.add("a", 1.5)
    assert queue.next_at() == 2.0, "an event may bring what it waits for"


def test_a_forgotten_key_leaves_nothing() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.begin(0.0)
    queue.fail("a", 0.0)
    queue.forget("a")
    assert queue.next_at() is None
    assert queue.waiting == 0
    queue.add("a", 0.0)
    assert queue.begin(0.0) == "a", "its back-off is forgotten as well"


def test_forgetting_a_key_that_runs_lets_it_end() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.begin(0.0)
    queue.add("a", 0.0)
    queue.forget("a")
    queue.end("a", 1.0)
    assert queue.begin(9.0) is None


# --- the queue on an event loop


class Work:
    """Counts what runs; `again` and `errors` say how each key's calls end."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.together = self.most_together = 0
        self.again: dict[str, list[float | None]] = {}
        self.errors: dict[str, list[Exception]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.running: set[str] = set()

    async def __call__(self, key: str) -> float | None:
        assert key not in self.running, "one key at a time"
        self.running.add(key)
        self.calls[key] += 1
        self.most_together = max(self.most_together, len(self.running))
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.running.discard(key)
        if self.errors.get(key):
            raise self.errors[key].pop(0)
        return self.again[key].pop(0) if self.again.get(key) else None


class Running:
    """A queue that runs; a context that ends it."""

    def __init__(self, work: Work, workers: int = 4) -> None:
        self.queue: WorkQueue[str] = WorkQueue(work, workers=workers, backoff=Backoff(0.02, 0.05))

    async def __aenter__(self) -> WorkQueue[str]:
        self.task = asyncio.create_task(self.queue.run())
        return self.queue

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(check: object) -> None:
    async with asyncio.timeout(5):
        while not check():  # type: ignore[operator]  # noqa: ASYNC110 - what is waited for is no event
            await asyncio.sleep(0.002)


async def test_woken_keys_are_worked_on() -> None:
    work = Work()
    async with Running(work) as queue:
        queue.wake("a")
        queue.wake("b")
        await until(lambda: work.calls == {"a": 1, "b": 1})
        assert queue.waiting == 0


async def test_no_more_than_the_workers_run_at_once_and_no_key_twice() -> None:
    work = Work()
    work.gate.clear()
    async with Running(work, workers=3) as queue:
        for index in range(10):
            queue.wake(f"key-{index}")
        await until(lambda: queue.running == 3)
        for index in range(10):
            queue.wake(f"key-{index}")
        work.gate.set()
        await until(lambda: queue.waiting == 0 and queue.running == 0)
        assert work.most_together == 3
        # those that ran when they were woken again have run twice
        assert sorted(work.calls.values()) == [1] * 7 + [2] * 3


async def test_work_comes_back_when_it_asks_to() -> None:
    work = Work()
    work.again["a"] = [0.0, 0.01, None]
    async with Running(work) as queue:
        queue.wake("a")
        await until(lambda: work.calls["a"] == 3)
        await asyncio.sleep(0.03)
        assert work.calls["a"] == 3


async def test_errors_are_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    work.errors["a"] = [ClusterError("the server is away"), ZeroDivisionError("a bug")]
    with caplog.at_level(logging.WARNING):
        async with Running(work) as queue:
            queue.wake("a")
            await until(lambda: work.calls["a"] == 3)
    assert "a: the server is away; next try in" in caplog.text
    assert "a bug" in caplog.text


async def test_one_key_that_hangs_does_not_hold_up_the_others() -> None:
    work = Work()
    work.gate.clear()
    async with Running(work, workers=2) as queue:
        queue.wake("stuck")
        await until(lambda: work.calls["stuck"] == 1)
        work.gate = asyncio.Event()
        work.gate.set()
        queue.wake("free")
        await until(lambda: work.calls["free"] == 1)


async def test_stopping_lets_running_work_end_and_begins_no_other() -> None:
    work = Work()
    work.gate.clear()
    async with Running(work, workers=1) as queue:
        queue.wake("a")
        queue.wake("b")
        await until(lambda: queue.running == 1)
        stopping = asyncio.create_task(queue.stop(grace_seconds=5))
        await asyncio.sleep(0.01)
        work.gate.set()
        await stopping
        assert work.calls == {"a": 1}
        assert queue.running == 0


async def test_cancelling_ends_work_that_does_not_end_by_itself() -> None:
    work = Work()
    work.gate.clear()
    async with Running(work) as queue:
        queue.wake("a")
        await until(lambda: queue.running == 1)
    assert work.running == set()
