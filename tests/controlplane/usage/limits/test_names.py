"""A model's limits bind what answers, however a request names it."""

from __future__ import annotations

import pytest

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.adapters.resolution import limit_names
from controlplane.tenancy.scoping import tenant_scope
from controlplane.usage.limits.services import limits_for, rate_limit_set
from tests.controlplane.conftest import Party


@pytest.fixture
def invoices(acme: Party, base_model: BaseModel) -> Adapter:
    """Three versions, of which the third is live."""
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        for number in (1, 2, 3):
            adapter.live_version = AdapterVersion.objects.create(
                adapter=adapter, number=number, status=AdapterVersion.Status.READY
            )
        adapter.save()
    return adapter


@pytest.mark.parametrize(
    ("limited", "bound", "free"),
    [
        ("invoices", ["invoices", "invoices@1", "invoices@3"], ["tiny", "letters", "invoices2"]),
        ("invoices@3", ["invoices@3", "invoices"], ["invoices@1", "tiny"]),
        ("invoices@1", ["invoices@1"], ["invoices", "invoices@3"]),
        ("tiny", ["tiny"], ["invoices"]),
        ("", ["tiny", "invoices", "invoices@3", "anything"], []),
    ],
)
def test_a_limit_binds_what_answers(
    limited: str, bound: list[str], free: list[str], acme: Party, globex: Party, invoices: Adapter
) -> None:
    with tenant_scope(acme.tenant.id):
        row = rate_limit_set(model=limited, requests_per_minute=5)
        for name in bound:
            assert [p.id for p in limits_for(acme.api_key, limit_names(name)).policies] == [
                row.id.hex
            ], name
        for name in free:
            assert limits_for(acme.api_key, limit_names(name)).policies == (), name
    with tenant_scope(globex.tenant.id):
        for name in bound:
            assert limits_for(globex.api_key, limit_names(name)).policies == ()


def test_the_limit_follows_the_live_version(acme: Party, invoices: Adapter) -> None:
    with tenant_scope(acme.tenant.id):
        rate_limit_set(model="invoices@3", requests_per_minute=5)
        invoices.live_version = invoices.versions.get(number=2)
        invoices.save()
        assert limits_for(acme.api_key, limit_names("invoices")).policies == ()
