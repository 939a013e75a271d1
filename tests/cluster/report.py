"""Telling what is done, step by step, with the time each step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from tests.cluster.settings import ClusterError

console = Console(stderr=True, highlight=False)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Prints what was done and for how long, also when it failed: a slow failing step must be nameable."""
    began = time.monotonic()
    try:
        yield
    except BaseException:
        console.print(f"  [red]failed[/red]  {what} [dim]({time.monotonic() - began:.1f} s)[/dim]")
        raise
    console.print(f"  [green]done[/green]    {what} [dim]({time.monotonic() - began:.1f} s)[/dim]")


def say(text: str) -> None:
    """One plain line for people; standard output stays free for what scripts read."""
    console.print(text, markup=False, soft_wrap=True)


def wait_until(
    what: str,
    check: Callable[[], bool],
    timeout_seconds: float,
    interval_seconds: float = 0.1,
    give_up: Callable[[], str | None] = lambda: None,
) -> None:
    """Returns once `check` is true.

    Args:
        what: what is waited for, as it completes "... did not become true: ".
        check: asked again and again; an exception is its caller's mistake and is not swallowed.
        timeout_seconds: how long to go on asking.
        interval_seconds: pause between two questions.
        give_up: a reason to stop at once, for example "etcd has exited"; None to go on.

    Raises:
        ClusterError: when time is up or `give_up` gave a reason.
    """
    deadline = time.monotonic() + timeout_seconds
    while not check():
        reason = give_up()
        if reason is not None:
            raise ClusterError(f"waiting for {what}: {reason}")
        if time.monotonic() > deadline:
            raise ClusterError(f"waiting for {what}: not so after {timeout_seconds:.0f} s")
        time.sleep(interval_seconds)
