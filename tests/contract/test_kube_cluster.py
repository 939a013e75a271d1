"""What only a real API server can say about the adapter: events, refusals, pages, outages."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from lora_operator.core.views import Event, EventType, JobKey
from lora_operator.ports import ClusterError, RefusedError
from tests.cluster.apiserver import ApiServer
from tests.contract.cluster_objects import NAMESPACE, a_child, a_companion, a_job, labels_of
from tests.contract.cluster_worlds import RealWorld


async def test_a_sentence_said_again_raises_the_count_of_its_event(real: RealWorld) -> None:
    job = real.seed(a_job())
    for _ in range(3):
        await real.cluster.emit(job, Event(EventType.WARNING, "Interrupted", "the node went away"))
    await real.cluster.emit(job, Event(EventType.NORMAL, "Started", "attempt 2"))
    await real.cluster.flush()
    events = real.ask("GET", real.path("Event", NAMESPACE))["items"]
    assert sorted((event["reason"], event["count"], event["type"]) for event in events) == [
        ("Interrupted", 3, "Warning"),
        ("Started", 1, "Normal"),
    ]
    assert all(event["reportingComponent"] == "lora-operator" for event in events)
    assert all(event["involvedObject"]["uid"] == job["metadata"]["uid"] for event in events)


async def test_a_sentence_whose_event_has_expired_is_said_anew(real: RealWorld) -> None:
    job, event = real.seed(a_job()), Event(EventType.NORMAL, "Started", "attempt 1")
    await real.cluster.emit(job, event)
    await real.cluster.flush()
    first = real.ask("GET", real.path("Event", NAMESPACE))["items"][0]
    real.remove("Event", NAMESPACE, first["metadata"]["name"])
    await real.cluster.emit(job, event)
    await real.cluster.flush()
    again = real.ask("GET", real.path("Event", NAMESPACE))["items"]
    assert [event["count"] for event in again] == [1]


async def test_kubectl_describe_shows_the_events(real: RealWorld, crd_server: ApiServer) -> None:
    job = real.seed(a_job())
    await real.cluster.emit(job, Event(EventType.NORMAL, "Started", "attempt 1"))
    await real.cluster.flush()
    assert "attempt 1" in crd_server.kubectl("describe", "ltj", "-n", NAMESPACE, "mascot")


async def test_what_the_server_refuses_is_told_in_its_own_words(real: RealWorld) -> None:
    child = a_child()
    child["spec"]["completions"] = -1
    with pytest.raises(RefusedError, match=r"spec\.completions.*must be greater than or equal to 0"):
        await real.cluster.create(child)
    with pytest.raises(RefusedError, match=r"namespaces .*nowhere.* not found"):
        await real.cluster.create(a_child(namespace="nowhere"))


async def test_a_refused_status_is_told_and_not_taken_for_a_conflict(real: RealWorld) -> None:
    job = real.seed(a_job())
    with pytest.raises(RefusedError, match=r"status\.phase"):
        await real.cluster.write_status(job, {"phase": "Nonsense"})


async def test_a_quota_that_is_exceeded_is_a_refusal(real: RealWorld) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": NAMESPACE},
        "spec": {"hard": {"count/configmaps": "0"}},
    }
    where = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    real.ask("POST", where, quota)
    # the quota controller is not here: its first count is written in its place
    made = real.ask("GET", f"{where}/none")
    status = {"hard": quota["spec"]["hard"], "used": {"count/configmaps": "0"}}
    real.ask("PUT", f"{where}/none/status", {**made, "status": status})
    try:
        with pytest.raises(RefusedError, match="exceeded quota"):
            await real.cluster.create(a_companion("ConfigMap"))
    finally:
        real.ask("DELETE", f"{where}/none")


async def test_lists_longer_than_a_page_are_complete(real: RealWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_operator.adapters.kube_api._PAGE_SIZE", 3)
    for index in range(8):
        real.seed(a_job(f"job-{index}"))
    real.seed(a_job("elsewhere", namespace="team-b"))
    names = [job["metadata"]["name"] async for job in real.cluster.list_jobs()]
    assert sorted(names) == ["elsewhere", *(f"job-{index}" for index in range(8))]
    assert [job["metadata"]["name"] async for job in real.cluster.list_jobs(["team-b"])] == ["elsewhere"]
    assert {job["kind"] async for job in real.cluster.list_jobs(["team-b"])} == {"LoRATrainingJob"}


async def test_a_server_that_hangs_is_an_error_within_the_time_limit(
    real: RealWorld, crd_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_operator.adapters.kube_api._TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    monkeypatch.setattr("lora_operator.adapters.kube_api._READ_PAUSES", (0.05,))
    crd_server.pause()
    try:
        async with asyncio.timeout(5):
            with pytest.raises(ClusterError, match="TimeoutError"):
                await real.cluster.read_job(JobKey(NAMESPACE, "mascot"))
    finally:
        crd_server.resume()


async def test_all_resources_are_served_once_the_crds_are_installed(real: RealWorld) -> None:
    assert await real.cluster.missing_resources() == frozenset()


def test_the_labels_of_tests_are_those_that_lists_select() -> None:
    assert labels_of("u")["lora-operator.io/job-uid"] == "u"
