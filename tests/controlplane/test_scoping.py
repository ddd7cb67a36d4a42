"""Tenant rows outside a scope, across scopes, and in requests that interleave."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async

from controlplane.scoping import TenantScopeError, all_tenants, current_tenant_id, tenant_scope
from controlplane.tenants.models import ApiKey
from tests.controlplane.conftest import Party


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
