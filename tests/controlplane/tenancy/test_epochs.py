"""Which writes move whose epoch, and what holds afterwards, with a real Redis and PostgreSQL."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from django.conf import settings

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.tenancy import epochs
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import ApiKey, Membership, ServiceAccount, Tenant, User
from controlplane.usage.limits.services import budget_set, rate_limit_set
from demo.ports import choose_ports
from demo.servers import HOST, Redis
from tests.controlplane.conftest import Party


@pytest.fixture
def client() -> Iterator[Any]:
    with redis.Redis.from_url(settings.REDIS_URL, protocol=2) as client:
        yield client


@pytest.fixture
async def reader() -> AsyncIterator[epochs.EpochReader]:
    client = redis.asyncio.Redis.from_url(settings.REDIS_URL, protocol=2)
    yield epochs.EpochReader(client)
    await client.aclose()


def scoped(sql: str, tenant_id: Any) -> str | None:
    with tenant_scope(tenant_id):
        return epochs.moved_by(sql)


class TestWrites:
    def test_the_epoch_moves_with_the_commit(
        self,
        acme: Party,
        client: Any,
        django_capture_on_commit_callbacks: Callable[..., Any],
    ) -> None:
        key = epochs.moved_key(str(acme.tenant.id))
        before = client.get(key)
        with django_capture_on_commit_callbacks() as callbacks, tenant_scope(acme.tenant.id):
            ApiKey.objects.update(name="other")
            assert client.get(key) == before, "before the commit, old rows can still be read"
        for callback in callbacks:
            callback()
        assert int(client.get(key)) > int(before or 0)

    @pytest.mark.django_db
    def test_what_may_take_rights_away_moves_the_tenants_epoch(
        self, acme: Party, django_capture_on_commit_callbacks: Callable[..., Any]
    ) -> None:
        tenant_id = str(acme.tenant.id)
        changes: list[tuple[Callable[[], Any], set[str]]] = [
            (lambda: ApiKey.objects.update(allowed_ips=["10.0.0.0/8"]), {tenant_id}),
            (lambda: ApiKey.objects.all().delete(), {tenant_id}),
            (lambda: Membership.objects.update(role="viewer"), {tenant_id}),
            (lambda: ServiceAccount.objects.update(role="viewer"), {tenant_id}),
            (lambda: Tenant.objects.filter(pk=tenant_id).update(status="suspended"), {tenant_id}),
            (lambda: rate_limit_set(requests_per_minute=1), {tenant_id}),
            (lambda: rate_limit_set(requests_per_minute=2), {tenant_id}),
            (lambda: budget_set(hard_limit=1), {tenant_id}),
            (lambda: Adapter.objects.update(live_version=None), {tenant_id}),
            (lambda: AdapterVersion.objects.update(status="retired"), {tenant_id}),
            (lambda: BaseModel.objects.update(is_active=False), {epochs.ALL}),
            (lambda: User.objects.update(is_active=False), {epochs.ALL}),
            (lambda: ApiKey.objects.update(last_used_at=None), set()),
            (lambda: User.objects.filter(pk=acme.owner.pk).update(last_login=None), set()),
            (lambda: list(ApiKey.objects.all()), set()),
        ]
        for number, (change, whose) in enumerate(changes):
            with django_capture_on_commit_callbacks() as callbacks, tenant_scope(acme.tenant.id):
                change()
            assert {callback.args[0] for callback in callbacks} == whose, number  # type: ignore[attr-defined]

    def test_operators_changes_move_all(self) -> None:
        with all_tenants(reason="a test"):
            assert epochs.moved_by('DELETE FROM "tenants_apikey" WHERE true') == epochs.ALL
        assert epochs.moved_by('UPDATE "tenants_tenant" SET "status" = %s') == epochs.ALL

    def test_an_update_that_hides_a_column_counts(self, acme: Party) -> None:
        seen = 'UPDATE "tenants_apikey" SET "last_used_at" = %s, "revoked_at" = %s WHERE true'
        hidden = 'UPDATE "tenants_apikey" SET "last_used_at" = (SELECT 1 WHERE true), "x" = %s'
        assert scoped(seen, acme.tenant.id) == scoped(hidden, acme.tenant.id)
        assert scoped(hidden, acme.tenant.id) == str(acme.tenant.id)


class TestStamps:
    async def test_a_stamp_holds_until_its_tenant_or_all_move(
        self, reader: epochs.EpochReader, acme: Party, globex: Party
    ) -> None:
        mine, others = acme.tenant.id, globex.tenant.id
        await reader.read()
        stamp = epochs.stamp()
        assert await reader.hold(mine, stamp)
        epochs.move(str(mine))
        assert not await reader.hold(mine, stamp)
        assert await reader.hold(others, stamp)
        assert await reader.hold(None, stamp)
        assert not await reader.hold(mine, epochs.stamp()), "the clock was not read since"
        await reader.read()
        stamp = epochs.stamp()
        assert await reader.hold(mine, stamp)
        epochs.move(epochs.ALL)
        assert not await reader.hold(others, stamp)

    async def test_a_stamp_ends_with_its_time_however_often_it_is_used(
        self,
        reader: epochs.EpochReader,
        acme: Party,
        settings: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        settings.DATABASE_AWAY_S = 30
        await reader.read()
        now = time.monotonic()
        clock = types.SimpleNamespace(monotonic=lambda: now)
        monkeypatch.setattr(epochs, "time", clock)
        stamp = epochs.stamp()
        for _ in range(10):
            now += 2.9
            assert await reader.hold(acme.tenant.id, stamp)
        now += 1.1
        assert not await reader.hold(acme.tenant.id, stamp)

    async def test_nothing_holds_with_another_clock(
        self, reader: epochs.EpochReader, acme: Party
    ) -> None:
        await reader.read()
        stamp = epochs.stamp()
        assert stamp.time is not None
        for time_ in (
            None,
            stamp.time._replace(clock="of a Redis that was restarted"),
            stamp.time._replace(now=stamp.time.now + 1),
        ):
            assert not await reader.hold(acme.tenant.id, stamp._replace(time=time_))


@dataclasses.dataclass
class Away:
    """A Redis that the epochs use and that can be stopped."""

    server: Redis

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.server.port}/0"

    def start(self) -> None:
        self.server.process.start()
        self.server.process.wait_until(self.server.is_ready, timeout_s=30)


@pytest.fixture
def away(tmp_path: Any, settings: Any) -> Iterator[Away]:
    server = Redis(tmp_path / "redis", port=choose_ports(1)[0], run=tmp_path / "run")
    server.prepare()
    made = Away(server)
    settings.REDIS_URL = made.url
    epochs._client.cache_clear()
    made.start()
    yield made
    epochs._client.cache_clear()
    server.process.stop()


class TestRedisAway:
    async def test_a_move_that_redis_missed_comes_later(self, away: Away, acme: Party) -> None:
        whose = str(acme.tenant.id)
        away.server.process.stop()
        started = time.monotonic()
        for _ in range(60):
            epochs.move(whose)
        assert time.monotonic() < started + 5, "the write does not wait for Redis"
        away.start()
        with redis.Redis.from_url(away.url) as client:
            until = time.monotonic() + 10
            while client.get(epochs.moved_key(whose)) != b"60" and time.monotonic() < until:
                time.sleep(0.05)
            assert client.get(epochs.moved_key(whose)) == b"60", "all move once Redis is back"

    async def test_nothing_holds_without_redis_or_after_its_restart(
        self, away: Away, acme: Party
    ) -> None:
        client = redis.asyncio.Redis.from_url(away.url, protocol=2)
        reader = epochs.EpochReader(client)
        await reader.read()
        stamp = epochs.stamp()
        assert await reader.hold(acme.tenant.id, stamp)
        away.server.process.stop()
        assert not await reader.hold(acme.tenant.id, stamp)
        away.start()
        assert not await reader.hold(acme.tenant.id, stamp), "a move may be lost with its end"
        await reader.read()
        assert await reader.hold(acme.tenant.id, epochs.stamp())
        await client.aclose()
