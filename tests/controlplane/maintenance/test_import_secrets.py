"""Secrets of imports under way move to another pepper, and are counted until then."""

from __future__ import annotations

from typing import Any

from controlplane.adapters.import_sources import Source
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, VersionImport
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.conftest import Party
from tests.controlplane.maintenance.test_pepper import change, end, status


def test_imports_move_with_the_rest(settings: Any, acme: Party, base_model: BaseModel) -> None:
    source = Source(origin={"host": "x.example"}, urls={"a": "https://x.example/"}, token="hf_1")
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        version = AdapterVersion.objects.create(adapter=adapter, number=1)
        job = VersionImport.objects.create(version=version, sealed=source.seal())
    assert status()["import_secrets"] == {"current": 1, "accepted": 0, "foreign": 0}
    before = status()["needs_accepted"]
    change(settings)
    counted = status()
    assert counted["import_secrets"] == {"current": 0, "accepted": 1, "foreign": 0}
    assert counted["needs_accepted"] >= before + 1
    assert status("--reencrypt")["import_secrets"] == {"current": 1, "accepted": 0, "foreign": 0}
    end(settings)
    with tenant_scope(acme.tenant.id):
        job.refresh_from_db()
        assert Source.unseal(source.origin, job.sealed) == source
