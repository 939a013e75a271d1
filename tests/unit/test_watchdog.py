"""The watchdog: what fails the liveness probe."""

from __future__ import annotations

import asyncio

import pytest

from lora_operator.watchdog import Watchdog, watcher_tasks


class Scene:
    def __init__(self, expected: int = 2) -> None:
        self.now = 0.0
        self.alive: set[str] = set()
        self.dog = Watchdog(
            expected_watchers=expected,
            watchers=lambda: frozenset(self.alive),
            startup_seconds=60.0,
            max_lag_seconds=10.0,
            time=lambda: self.now,
        )


def test_a_process_that_has_all_its_watchers_is_well() -> None:
    scene = Scene()
    scene.alive = {"watcher for jobs", "watcher for pods"}
    assert scene.dog.problems() == []


def test_watchers_may_take_a_while_to_start_but_not_for_ever() -> None:
    scene = Scene()
    assert scene.dog.problems() == []
    scene.now = 59.0
    assert scene.dog.problems() == []
    scene.alive = {"watcher for jobs"}
    scene.now = 61.0
    assert scene.dog.problems() == ["1 of 2 watchers have started"]


def test_a_watcher_that_was_there_and_is_gone_is_a_problem_at_once() -> None:
    scene = Scene()
    scene.alive = {"watcher for jobs", "watcher for pods"}
    assert scene.dog.problems() == []
    scene.alive = {"watcher for jobs"}
    assert scene.dog.problems() == ["watcher for pods has ended"]


def test_an_event_loop_that_is_late_is_a_problem() -> None:
    scene = Scene(expected=0)
    scene.dog.lag_seconds = 10.5
    assert scene.dog.problems() == ["the event loop is 10.5 s late"]


async def test_a_task_of_our_own_that_has_ended_is_a_problem() -> None:
    scene = Scene(expected=0)

    async def ends() -> None:
        return

    task = asyncio.create_task(ends(), name="work queue")
    scene.dog.guard([task])
    assert scene.dog.problems() == []
    await task
    assert scene.dog.problems() == ["task work queue has ended"]


async def test_the_watchers_are_found_by_the_names_that_kopf_gives_its_tasks() -> None:
    async def sleeps() -> None:
        await asyncio.sleep(60)

    task = asyncio.create_task(sleeps(), name="watcher for pods.v1@None")
    assert watcher_tasks() == {"watcher for pods.v1@None"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert watcher_tasks() == frozenset()


async def test_lag_is_measured_and_problems_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    import time

    dog = Watchdog(expected_watchers=0, max_lag_seconds=0.05)
    task = asyncio.create_task(dog.measure(interval_seconds=0.01))
    await asyncio.sleep(0.005)
    time.sleep(0.1)  # noqa: ASYNC251 - the very thing that is to be found
    await asyncio.sleep(0.001)
    assert dog.lag_seconds > 0.05
    assert "the event loop is" in caplog.text
    task.cancel()
