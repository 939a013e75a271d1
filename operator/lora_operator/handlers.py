"""Every kopf handler of the operator. kopf watches and calls; what is done about it is the runtime's.

Only low-level event handlers: kopf then writes nothing to any object, neither finalizers nor annotations.
"""
# mypy: disallow-untyped-decorators=False
# (kopf's types are not followed, see pyproject.toml)

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import kopf

from lora_api.job import GROUP, PLURAL, VERSION
from lora_api.names import LABEL_MANAGED_BY, MANAGED_BY
from lora_api.profile import PROFILE_PLURAL
from lora_operator.runtime import Runtime

WATCHERS_PER_NAMESPACE = 3  # jobs, batch jobs, pods
CLUSTER_WIDE_WATCHERS = 1  # profiles


def register(runtime: Runtime, login: Callable[[], Awaitable[kopf.ConnectionInfo]]) -> kopf.OperatorRegistry:
    """A registry with all handlers, bound to a runtime.

    Args:
        runtime: What the handlers call.
        login: Fresh credentials for the API server.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        runtime.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await runtime.stop()

    @kopf.on.login(registry=registry, backoff=5.0)
    async def authenticate(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_seen(event: kopf.RawEvent, **_: Any) -> None:
        runtime.saw_job(event["type"], dict(event["object"]))

    @kopf.on.event(GROUP, VERSION, PROFILE_PLURAL, registry=registry)
    async def profile_seen(name: str, **_: Any) -> None:
        runtime.saw_profile(name)

    @kopf.on.event("batch", "v1", "jobs", registry=registry)
    async def child_seen(event: kopf.RawEvent, **_: Any) -> None:
        runtime.saw_child(dict(event["object"]))

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def pod_seen(event: kopf.RawEvent, **_: Any) -> None:
        runtime.saw_pod(dict(event["object"]))

    @kopf.on.probe(registry=registry, id="healthy", errors=kopf.ErrorsMode.PERMANENT)
    async def healthy(**_: Any) -> bool:
        problems = runtime.watchdog.problems()
        if problems:
            raise kopf.PermanentError("; ".join(problems))
        return True

    return registry


class _EndlessBackoffs:
    """Pauses between tries, for ever: a watcher whose tries run out never comes back."""

    def __init__(self, longest_seconds: float = 30.0) -> None:
        self._longest = longest_seconds

    def __iter__(self) -> Iterator[float]:
        for exponent in itertools.count():
            yield min(2.0 ** min(exponent, 16), self._longest) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load


def settings() -> kopf.OperatorSettings:
    """How kopf is run: alone, silent in the cluster, never giving up on a watch."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True
    chosen.posting.enabled = False
    chosen.scanning.disabled = True  # no watching of CRDs and namespaces: less to be allowed
    chosen.watching.server_timeout = 600
    chosen.watching.client_timeout = 660
    chosen.watching.reconnect_backoff = 1.0
    chosen.watching.chunk_size = 500
    for resource in (("batch", "v1", "jobs"), ("", "v1", "pods")):
        chosen.watching.label_selectors[resource] = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
    chosen.queueing.exit_timeout = 5.0
    chosen.queueing.error_delays = (1, 2, 5, 10, 30, 60)
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    chosen.networking.error_backoffs = _EndlessBackoffs()
    chosen.networking.trust_env = True  # as the other client does
    chosen.process.ultimate_exiting_timeout = 25  # below the pod's grace period of 30
    return chosen
