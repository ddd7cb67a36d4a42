"""Tenant rows outside a scope, across scopes, and in requests that interleave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient
from django.urls import path

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.tenancy.scoping import (
    TenantScopeError,
    all_tenants,
    current_tenant_id,
    tenant_scope,
)
from controlplane.tenants import auth, services
from controlplane.tenants.models import ApiKey
from tests.controlplane.conftest import Party, make_party


def test_query_without_scope_raises(acme: Party) -> None:
    with pytest.raises(TenantScopeError):
        ApiKey.objects.all()


def test_save_without_scope_raises(acme: Party) -> None:
    acme.api_key.name = "other"
    with pytest.raises(TenantScopeError):
        acme.api_key.save()


def test_scope_hides_other_tenants(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id):
        assert list(ApiKey.objects.all()) == [acme.api_key]
        assert not ApiKey.objects.filter(public_id=globex.api_key.public_id).exists()


def test_cannot_save_a_row_of_another_tenant(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id), pytest.raises(TenantScopeError):
        globex.api_key.save()


def test_cannot_move_a_row_by_its_foreign_key(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id), pytest.raises(TenantScopeError):
        ApiKey.objects.create(tenant=globex.tenant, public_id="x", secret_hmac=b"", name="x")


def test_bulk_create_keeps_the_same_rule(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id):
        (made,) = ApiKey.objects.bulk_create([ApiKey(public_id="y", secret_hmac=b"", name="y")])
        assert made.tenant_id == acme.tenant.id
        with pytest.raises(TenantScopeError):
            ApiKey.objects.bulk_create(
                [ApiKey(tenant=globex.tenant, public_id="z", secret_hmac=b"", name="z")]
            )


def test_update_cannot_move_rows(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id), pytest.raises(TenantScopeError):
        ApiKey.objects.update(tenant=globex.tenant)


def test_bulk_update_cannot_move_rows(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id), pytest.raises(TenantScopeError):
        acme.api_key.tenant = globex.tenant
        ApiKey.objects.bulk_update([acme.api_key], ["tenant"])


def test_relations_keep_to_the_scope(acme: Party, globex: Party, base_model: BaseModel) -> None:
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        adapter.versions.create(number=1)
        assert adapter.versions.count() == 1
    with tenant_scope(globex.tenant.id):
        assert adapter.versions.count() == 0
        with pytest.raises(TenantScopeError):
            adapter.versions.create(number=2)
    with pytest.raises(TenantScopeError):
        adapter.versions.count()


def test_all_tenants_needs_a_reason() -> None:
    with pytest.raises(ValueError), all_tenants(reason=""):
        pass


def test_scopes_nest_and_unwind(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id):
        with tenant_scope(globex.tenant.id):
            assert current_tenant_id() == globex.tenant.id
        assert current_tenant_id() == acme.tenant.id
    with pytest.raises(TenantScopeError):
        current_tenant_id()


async def test_interleaved_tasks_keep_their_own_scope(acme: Party, globex: Party) -> None:
    """Forces every interleaving point: after each step the other task runs."""
    turns = [asyncio.Event() for _ in range(2)]

    async def act(party: Party, mine: asyncio.Event, other: asyncio.Event) -> list[object]:
        seen: list[object] = []
        with tenant_scope(party.tenant.id):
            for _ in range(10):
                await mine.wait()
                mine.clear()
                seen.append(current_tenant_id())
                seen.append(await sync_to_async(current_tenant_id)())
                other.set()
        with pytest.raises(TenantScopeError):
            current_tenant_id()
        return seen

    turns[0].set()
    seen_acme, seen_globex = await asyncio.gather(
        act(acme, turns[0], turns[1]), act(globex, turns[1], turns[0])
    )
    assert set(seen_acme) == {acme.tenant.id}
    assert set(seen_globex) == {globex.tenant.id}


class Meeting:
    """Lets requests past only when all of them are inside."""

    size = 2

    def __init__(self) -> None:
        self._inside = 0
        self._full = asyncio.Event()

    async def join(self) -> None:
        self._inside += 1
        if self._inside == self.size:
            self._full.set()
        await self._full.wait()


meeting: Meeting


async def names_of_keys(request: HttpRequest) -> JsonResponse:
    """An async view as the gateway's are: authenticate, enter the scope, wait, query."""
    principal = await sync_to_async(auth.authenticate)(request.headers["Authorization"])
    with tenant_scope(principal.tenant.id):
        await meeting.join()
        names = [key.name async for key in ApiKey.objects.order_by("name")]
        await asyncio.sleep(0)
        again = await sync_to_async(lambda: [key.name for key in ApiKey.objects.order_by("name")])()
    return JsonResponse({"names": names, "again": again})


urlpatterns = [path("names", names_of_keys)]


@pytest.mark.django_db(transaction=True)
async def test_requests_that_interleave_keep_their_own_scope(settings: Any) -> None:
    global meeting
    settings.ROOT_URLCONF = __name__

    def make() -> list[Party]:
        parties = [make_party("acme"), make_party("globex")]
        for party in parties:
            with tenant_scope(party.tenant.id):
                services.api_key_create(name=f"key of {party.tenant.slug}")
        return parties

    parties = await sync_to_async(make)()
    for _ in range(3):
        meeting = Meeting()
        answers = await asyncio.gather(
            *(AsyncClient().get("/names", headers={"Authorization": p.header}) for p in parties)
        )
        for party, answer in zip(parties, answers, strict=True):
            expected = [f"key of {party.tenant.slug}", "tests"]
            assert answer.json() == {"names": expected, "again": expected}
    await sync_to_async(connections.close_all)()
