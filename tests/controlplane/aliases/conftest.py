"""An alias's surroundings: two adapters of a tenant, with ready versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases import services
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.models import Alias
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.conftest import Party

Status = AdapterVersion.Status


def add(adapter: Adapter, status: str = Status.READY) -> AdapterVersion:
    """The next version, as the check leaves it."""
    last = adapter.versions.order_by("number").last()
    number = 1 if last is None else last.number + 1
    digest = f"{adapter.pk.hex}{number:032x}"
    version = AdapterVersion.objects.create(
        adapter=adapter, number=number, status=status, digest=digest
    )
    if status == Status.READY:
        promotion.ready_apply(promotion.lock(adapter.pk), version)
    return version


def parts(*names: str) -> tuple[Part, ...]:
    """Parts of a target: "invoices", "invoices@2" or "0.5*invoices@2"."""
    found = []
    for name in names:
        weight, _, named = name.rpartition("*")
        adapter, _, number = named.partition("@")
        version = int(number) if number else None
        found.append(Part(adapter=adapter, version=version, weight=float(weight or 1)))
    return tuple(found)


@pytest.fixture
def adapter(acme: Party, base_model: BaseModel) -> Iterator[Adapter]:
    """`invoices` with three ready versions, of which the first is live; acme is in scope."""
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        for _ in range(3):
            add(adapter)
        adapter.refresh_from_db()
        yield adapter


@pytest.fixture
def letters(adapter: Adapter, base_model: BaseModel) -> Adapter:
    """Another adapter of acme's, with one version."""
    other = Adapter.objects.create(name="letters", base_model=base_model)
    add(other)
    other.refresh_from_db()
    return other


@pytest.fixture
def alias(adapter: Adapter) -> Alias:
    """`prod`: the live version of invoices for most, version 2 for a tenth."""
    contents = Contents(primary=parts("invoices"), canary=parts("invoices@2"), canary_percent=10)
    return services.alias_create(name="prod", contents=contents)
