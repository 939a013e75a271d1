"""The API server as JSON over HTTP: requests with time limits, retried reads, answers in words.

Objects stay plain data: the generated models of the client library would cost a copy of every pod and lose the fields
that a newer server sends. The library brings what is hard: every way to log in, and TLS.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from lora_operator.core.views import Manifest
from lora_operator.ports import ClusterError, RefusedError

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_REFUSED = frozenset({400, 403, 405, 406, 413, 415, 422})  # the same request will be refused again
_RETRIED = frozenset({429, 500, 502, 503, 504})  # the server's trouble, not the request's
_READ_PAUSES = (0.2, 0.8, 2.0)  # seconds before the second, third and fourth try of a read
_PAGE_SIZE = 500
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)  # ValueError: the answer is no JSON


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    code: int
    body: Manifest

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        return self.code < 300

    @property
    def reason(self) -> str:
        """The server's CamelCase reason, such as AlreadyExists; empty when it gave none."""
        return str(self.body.get("reason") or "")

    @property
    def message(self) -> str:
        """The server's own sentence."""
        return str(self.body.get("message") or f"HTTP {self.code}")

    def require_ok(self) -> Manifest:
        """The object.

        Raises:
            RefusedError: When the server understood and refused; its message is the server's.
            ClusterError: When another try may help.
        """
        if self.ok:
            return self.body
        if self.code in _REFUSED:
            raise RefusedError(self.message)
        raise ClusterError(f"HTTP {self.code}: {self.message}")


def path(
    api_version: str, plural: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None
) -> str:
    """Path of an object or collection; `path("batch/v1", "jobs", "team-a", "x")` is `/apis/batch/v1/namespaces/team-a/jobs/x`."""
    parts = ["/apis" if "/" in api_version else "/api", api_version]
    if namespace is not None:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(plural)
    if name is not None:
        parts.append(quote(name, safe=""))
    if subresource is not None:
        parts.append(subresource)
    return "/".join(parts)


async def load_configuration(kubeconfig: Path | None = None) -> Configuration:
    """How to reach the API server and who we are: the given file, `KUBECONFIG`, the pod's service account, `~/.kube/config`.

    Raises:
        ClusterError: When none of them can be used.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = 64
    explicit = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG")
    try:
        if explicit is None and (_SERVICE_ACCOUNT / "token").is_file():
            load_incluster_config(client_configuration=configuration)
        else:
            await load_kube_config(config_file=explicit, client_configuration=configuration, persist_config=False)
    except (ConfigException, OSError) as error:
        raise ClusterError(f"no way to the API server: {error}") from error
    return configuration


class KubeApi:
    """One connection pool to one API server."""

    def __init__(
        self,
        client: ApiClient,
        *,
        jitter: Callable[[], float] = random.random,
        on_answer: Callable[[str, int], None] = lambda _method, _code: None,
    ) -> None:
        """A pool over a client that is logged in.

        Args:
            client: The library's client; closed by `close`.
            jitter: Numbers in [0, 1) that spread retries.
            on_answer: Told the method and status code of each answer; code 0 when there was none.
        """
        self._client = client
        self._jitter = jitter
        self._on_answer = on_answer

    @classmethod
    async def connect(
        cls, kubeconfig: Path | None = None, *, on_answer: Callable[[str, int], None] = lambda _method, _code: None
    ) -> KubeApi:
        """A pool with the credentials that `load_configuration` finds. Does not talk to the server yet."""
        return cls(ApiClient(await load_configuration(kubeconfig)), on_answer=on_answer)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def get(self, where: str, params: Mapping[str, str] | None = None) -> Manifest | None:
        """The object; None when there is none. Raises ClusterError."""
        answer = await self.request("GET", where, params=params)
        return None if answer.code == 404 else answer.require_ok()

    async def list(self, where: str, params: Mapping[str, str] | None = None) -> list[Manifest]:
        """All objects of a collection, page by page. Raises ClusterError."""
        return [item async for item in self.pages(where, params)]

    async def pages(self, where: str, params: Mapping[str, str] | None = None) -> AsyncIterator[Manifest]:
        """The objects of a collection one by one, a page of them in memory at a time.

        A page token that grew too old starts the list anew: an object may come twice, none is left out.
        """
        token = ""
        while True:
            query = {**(params or {}), "limit": str(_PAGE_SIZE)}
            if token:
                query["continue"] = token
                query.pop("resourceVersion", None)  # the token carries it
            answer = await self.request("GET", where, params=query)
            if answer.code == 410 and token:
                token = ""
                continue
            page = answer.require_ok()
            # items of a list don't say what they are
            kind = {"apiVersion": page.get("apiVersion"), "kind": str(page.get("kind", "")).removesuffix("List")}
            for item in page.get("items") or []:
                yield {**kind, **item}
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    async def request(
        self,
        method: str,
        where: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
    ) -> Answer:
        """The server's answer, whatever it is; only reads are tried again, writes are their caller's decision.

        Raises:
            ClusterError: When there was no answer.
        """
        url = f"{where}?{urlencode(params)}" if params else where
        pauses = iter(_READ_PAUSES if method == "GET" else ())
        while True:
            pause = next(pauses, None)
            try:
                answer = await self._once(method, url, body, content_type)
            except _TRANSPORT_ERRORS as error:
                self._on_answer(method, 0)
                if pause is None:
                    raise ClusterError(f"{method} {where}: {type(error).__name__}: {error}") from error
            else:
                self._on_answer(method, answer.code)
                if answer.code not in _RETRIED or pause is None:
                    return answer
            await asyncio.sleep(pause * (0.5 + self._jitter()))

    async def _once(self, method: str, url: str, body: Any, content_type: str) -> Answer:
        serialized = await self._client.param_serialize(
            method,
            url,
            header_params={"Accept": JSON, "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        response = await self._client.rest_client.request(
            method, serialized[1], headers=serialized[2], body=body, _request_timeout=_TIMEOUT
        )
        data = await response.read()
        # proxies in front of the server answer with text
        content = json.loads(data) if data[:1] in (b"{", b"[") else {"message": data.decode(errors="replace")[:500]}
        return Answer(response.status, content)
