"""Stores are opened with the operator's own Secrets: what is said when one is missing, and what is kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lora_api.profile import StoreSpec
from lora_api.store import Store, StoreCredentialsError, StoreError
from lora_api.stores import Credentials
from lora_operator.adapters.store import SecretStores
from lora_operator.ports import ClusterError
from tests.contract.cluster_objects import a_secret
from tests.contract.fake_cluster import FakeCluster


class Scene:
    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.cluster = FakeCluster()
        self.opened: list[tuple[StoreSpec, Credentials | None]] = []
        self.stores = SecretStores(self.cluster, self, operator_namespace="ops", opener=self.open)

    def now(self) -> datetime:
        return self.time

    def open(self, spec: StoreSpec, credentials: Credentials | None) -> Any:
        self.opened.append((spec, credentials))
        return object()

    def put_secret(self, **values: str) -> None:
        self.cluster.vanish("Secret", "ops", "store")
        self.cluster.apply(a_secret(namespace="ops", **values))


def a_spec(bucket: str = "lora", secret: str | None = "store") -> StoreSpec:
    facts = {
        "name": "default",
        "endpoint": "http://minio:9000",
        "bucket": bucket,
        "credentials": {"operatorSecretName": secret},
    }
    return StoreSpec.model_validate(facts)


async def test_a_store_is_opened_once_and_handed_out_again() -> None:
    scene = Scene()
    scene.put_secret()
    first = await scene.stores.open(a_spec())
    assert await scene.stores.open(a_spec()) is first
    assert await scene.stores.open(a_spec("other")) is not first
    assert scene.cluster.calls["read_secret"] == 1, "both stores name the same Secret"
    assert [credentials for _, credentials in scene.opened] == [Credentials("key", "secret")] * 2


async def test_a_rotated_secret_is_taken_over_within_a_minute_and_an_unchanged_one_keeps_the_client() -> None:
    scene = Scene()
    scene.put_secret()
    first = await scene.stores.open(a_spec())
    scene.time += timedelta(seconds=61)
    assert await scene.stores.open(a_spec()) is first
    scene.put_secret(accessKey="new", secretKey="new")
    assert await scene.stores.open(a_spec()) is first
    scene.time += timedelta(seconds=61)
    assert await scene.stores.open(a_spec()) is not first
    assert scene.opened[-1][1] == Credentials("new", "new")


async def test_a_missing_secret_is_named_and_looked_for_again_each_time() -> None:
    scene = Scene()
    with pytest.raises(StoreCredentialsError, match=r"Secret ops/store of store 'default' does not exist"):
        await scene.stores.open(a_spec())
    scene.put_secret()
    assert await scene.stores.open(a_spec())


async def test_a_missing_or_empty_key_is_named() -> None:
    scene = Scene()
    scene.put_secret(accessKey="a", secretKey=" ")
    with pytest.raises(StoreCredentialsError, match=r"Secret ops/store .* lacks the key secretKey"):
        await scene.stores.open(a_spec())


async def test_a_profile_that_names_no_secret_is_told_so() -> None:
    with pytest.raises(StoreCredentialsError, match=r"operatorSecretName"):
        await Scene().stores.open(a_spec(secret=None))


async def test_an_api_server_that_is_away_is_no_verdict_on_the_credentials() -> None:
    scene = Scene()
    scene.cluster.fail("read_secret", ClusterError("HTTP 503"))
    with pytest.raises(StoreError, match="HTTP 503") as caught:
        await scene.stores.open(a_spec())
    assert not isinstance(caught.value, StoreCredentialsError)


async def test_a_directory_needs_no_credentials() -> None:
    scene = Scene()
    spec = StoreSpec.model_validate({"name": "here", "type": "directory", "directory": "/data"})
    store: Store = await scene.stores.open(spec)
    assert store
    assert scene.opened == [(spec, None)]


async def test_stores_of_former_profiles_are_let_go() -> None:
    scene = Scene()
    scene.put_secret()
    for index in range(200):
        await scene.stores.open(a_spec(f"bucket-{index}"))
    assert len(scene.stores._opened) <= 64
