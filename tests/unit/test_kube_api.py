"""Requests to an API server that misbehaves in every way a loaded or restarting one does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from lora_operator.adapters import kube_api
from lora_operator.adapters.kube_api import KubeApi, load_configuration, path
from lora_operator.ports import ClusterError, RefusedError

Reply = Callable[[web.Request], web.StreamResponse]


class Server:
    """Answers with what was put in line, then with an empty object; notes what it was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.asked: list[str] = []
        self.answers: list[tuple[str, int]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        reply = self.replies.pop(0) if self.replies else lambda _: web.json_response({})
        return reply(request)

    def says(self, *codes: int, **body: object) -> None:
        for code in codes:
            self.replies.append(lambda _, code=code: web.json_response(body, status=code))

    def hangs_up(self) -> None:
        def reply(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.close()
            return web.Response()

        self.replies.append(reply)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(kube_api, "_READ_PAUSES", (0.0, 0.0, 0.0))
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield server
    await runner.cleanup()


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[KubeApi]:
    api = await KubeApi.connect(
        a_kubeconfig(tmp_path, server.url),  # type: ignore[attr-defined]
        on_answer=lambda method, code: server.answers.append((method, code)),
    )
    yield api
    await api.close()


def a_kubeconfig(folder: Path, url: str, name: str = "config") -> Path:
    file = folder / name
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": url}}],
        "users": [{"name": "x", "user": {"token": "secret-token"}}],
    }
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_a_read_is_tried_again_while_the_server_has_trouble(api: KubeApi, server: Server, code: int) -> None:
    server.says(code, code)
    server.says(200, name="there")
    assert await api.get("/x") == {"name": "there"}
    assert server.answers == [("GET", code), ("GET", code), ("GET", 200)]


async def test_a_read_gives_up_after_four_tries(api: KubeApi, server: Server) -> None:
    server.says(*[503] * 9, message="overloaded")
    with pytest.raises(ClusterError, match="HTTP 503: overloaded"):
        await api.get("/x")
    assert len(server.asked) == 4


async def test_a_write_is_never_sent_twice(api: KubeApi, server: Server) -> None:
    server.says(503, message="overloaded")
    answer = await api.request("POST", "/x", body={})
    with pytest.raises(ClusterError, match="overloaded"):
        answer.require_ok()
    server.hangs_up()
    with pytest.raises(ClusterError, match="POST /y: "):
        await api.request("POST", "/y", body={})
    assert [line for line in server.asked if "/y" in line] == ["POST /y"]


async def test_a_connection_that_breaks_is_made_anew_for_reads(api: KubeApi, server: Server) -> None:
    server.hangs_up()
    server.says(200, name="there")
    assert await api.get("/x") == {"name": "there"}
    assert server.asked == ["GET /x", "GET /x"]


async def test_an_answer_that_is_no_json_is_quoted(api: KubeApi, server: Server) -> None:
    server.replies.append(lambda _: web.Response(text="<html>bad gateway</html>", status=418))
    with pytest.raises(ClusterError, match="bad gateway"):
        await api.get("/x")


@pytest.mark.parametrize("code", [400, 403, 413, 422])
async def test_a_refusal_carries_the_servers_own_words(api: KubeApi, server: Server, code: int) -> None:
    server.says(code, message="spec.x: must be y")
    with pytest.raises(RefusedError, match=r"^spec\.x: must be y$"):
        await api.get("/x")


async def test_no_object_is_none_and_not_an_error(api: KubeApi, server: Server) -> None:
    server.says(404, message="not found")
    assert await api.get("/x") is None


async def test_a_list_goes_on_where_its_page_ended_and_from_the_start_when_the_token_is_too_old(
    api: KubeApi, server: Server
) -> None:
    first = {"kind": "PodList", "apiVersion": "v1", "metadata": {"continue": "t"}, "items": [{"a": 1}]}
    server.says(200, **first)
    server.says(410, message="too old")
    server.says(200, **first)
    server.says(200, kind="PodList", apiVersion="v1", metadata={}, items=[{"a": 2}])
    items = await api.list("/pods", {"resourceVersion": "0", "labelSelector": "a=b"})
    assert [item["a"] for item in items] == [1, 1, 2]
    assert all(item["kind"] == "Pod" and item["apiVersion"] == "v1" for item in items)
    assert "resourceVersion=0" in server.asked[0]
    assert "resourceVersion" not in server.asked[1]
    assert "labelSelector=a%3Db" in server.asked[1]


async def test_requests_carry_the_token_and_ask_for_json(api: KubeApi, server: Server) -> None:
    seen: dict[str, str] = {}

    def reply(request: web.Request) -> web.Response:
        seen.update({key: request.headers[key] for key in ("Authorization", "Accept", "Content-Type")})
        return web.json_response({})

    server.replies.append(reply)
    await api.request("PATCH", "/x", body={"a": 1}, content_type=kube_api.MERGE_PATCH)
    assert seen["Authorization"] == "Bearer secret-token"
    assert seen["Content-Type"] == "application/merge-patch+json"
    assert seen["Accept"] == "application/json"


def test_paths_are_those_of_the_api_and_names_can_not_leave_them() -> None:
    assert path("v1", "pods", "a") == "/api/v1/namespaces/a/pods"
    assert path("batch/v1", "jobs", "a", "x") == "/apis/batch/v1/namespaces/a/jobs/x"
    assert path("lora-operator.io/v1alpha1", "loratrainingprofiles", None, "default").endswith(
        "/loratrainingprofiles/default"
    )
    assert path("g/v1", "things", "a", "x", "status").endswith("/things/x/status")
    assert path("v1", "pods", "a", "../../secrets") == "/api/v1/namespaces/a/pods/..%2F..%2Fsecrets"


async def test_a_given_kubeconfig_goes_before_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = a_kubeconfig(tmp_path, "http://given", "given"), a_kubeconfig(tmp_path, "http://named", "named")
    monkeypatch.setenv("KUBECONFIG", str(named))
    assert (await load_configuration(given)).host == "http://given"
    assert (await load_configuration()).host == "http://named"


async def test_without_any_way_to_the_server_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no way to the API server"):
        await load_configuration(tmp_path / "absent")
