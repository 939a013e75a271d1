"""Events about jobs: one object for each different sentence, its count raised when the sentence is said again.

They are sent in the background: news must not hold up what it tells of.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime

from lora_operator.adapters.kube_api import MERGE_PATCH, KubeApi, path
from lora_operator.core.views import Event, Manifest
from lora_operator.ports import Clock, ClusterError

COMPONENT = "lora-operator"

_log = logging.getLogger(__name__)
_REMEMBERED = 4096  # sentences; the server forgets events after an hour anyway
_MAX_MESSAGE = 1024
_MAX_WAITING = 1000  # events that are not sent yet


@dataclass
class _Said:
    """A sentence that the server knows."""

    name: str
    count: int


class EventRecorder:
    """Writes core/v1 events, the kind that `kubectl describe` reads on every version."""

    def __init__(self, api: KubeApi, clock: Clock, *, instance: str = COMPONENT) -> None:
        self._api = api
        self._clock = clock
        self._instance = instance
        self._said: OrderedDict[tuple[str, ...], _Said] = OrderedDict()
        self._waiting: asyncio.Queue[tuple[Manifest, Event]] = asyncio.Queue(_MAX_WAITING)
        self._sender: asyncio.Task[None] | None = None

    def emit(self, job: Manifest, event: Event) -> None:
        """Has the event sent. Never raises: what could not be told is logged."""
        try:
            self._waiting.put_nowait((job, event))
        except asyncio.QueueFull:
            _log.warning("event %s was not sent: too many are waiting", event.reason)
            return
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_waiting(), name="event sender")

    async def flush(self, timeout_seconds: float = 5.0) -> None:
        """Returns once everything is sent, or time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                if self._sender is not None:
                    await asyncio.wait([self._sender])
                await self._send_waiting()
        except TimeoutError:
            _log.warning("%d events were not sent: time is up", self._waiting.qsize())

    async def _send_waiting(self) -> None:
        while not self._waiting.empty():
            job, event = self._waiting.get_nowait()
            try:
                await self._emit(job, event)
            except (ClusterError, KeyError) as error:
                _log.warning("event %s was not sent: %s", event.reason, error)

    async def _emit(self, job: Manifest, event: Event) -> None:
        key = (job["metadata"]["uid"], event.type, event.reason, event.message)
        now = _rfc3339(self._clock.now())
        said = self._said.get(key)
        namespace = job["metadata"]["namespace"]
        if said is not None:
            self._said.move_to_end(key)
            patch = {"count": said.count + 1, "lastTimestamp": now}
            answer = await self._api.request(
                "PATCH", path("v1", "events", namespace, said.name), body=patch, content_type=MERGE_PATCH
            )
            if answer.code != 404:  # the server forgets events after a while
                answer.require_ok()
                said.count += 1
                return
        manifest = self._build(job, event, now)
        answer = await self._api.request("POST", path("v1", "events", namespace), body=manifest)
        answer.require_ok()
        self._said[key] = _Said(manifest["metadata"]["name"], 1)
        while len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)

    def _build(self, job: Manifest, event: Event, now: str) -> Manifest:
        meta = job["metadata"]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                # random, as event names outlive this process and must not meet those of the one before
                "name": f"{meta['name'][:230].rstrip('.-')}.{secrets.token_hex(8)}",
                "namespace": meta["namespace"],
            },
            "involvedObject": {
                "apiVersion": job["apiVersion"],
                "kind": job["kind"],
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", ""),
            },
            "type": str(event.type),
            "reason": event.reason,
            "message": event.message[:_MAX_MESSAGE],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
        }


def _rfc3339(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
