"""People with browsers, and an adapter with a past."""

from __future__ import annotations

import dataclasses

import pytest
from django.test import Client

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import User
from controlplane.training.models import Dataset, TrainingRun
from tests.controlplane.conftest import Party


def browser_of(user: User) -> Client:
    """A browser in which the person is signed in."""
    client = Client()
    client.force_login(user)
    return client


@dataclasses.dataclass(frozen=True)
class Belongings:
    """One of everything that acme has and that has a page."""

    adapter: Adapter
    ready: AdapterVersion
    rejected: AdapterVersion
    run: TrainingRun


@pytest.fixture
def belongings(acme: Party, base_model: BaseModel) -> Belongings:
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        ready = AdapterVersion.objects.create(
            adapter=adapter,
            number=1,
            status=AdapterVersion.Status.READY,
            digest="d1" * 32,
            num_bytes=4096,
            max_rank=8,
            created_by=acme.owner,
        )
        adapter.live_version = ready
        adapter.save()
        rejected = AdapterVersion.objects.create(
            adapter=adapter,
            number=2,
            status=AdapterVersion.Status.REJECTED,
            reasons=[{"field": "use_dora", "message": "DoRA <is> not supported."}],
        )
        dataset = Dataset.objects.create(name="chats", sha256="ab" * 32, num_bytes=10, num_rows=1)
        run = TrainingRun.objects.create(
            adapter=adapter,
            dataset=dataset,
            dataset_sha256=dataset.sha256,
            status=TrainingRun.Status.RUNNING,
            progress={"step": 3, "steps": 10, "loss": 1.25, "losses": [[1, 2.0], [3, 1.25]]},
        )
    return Belongings(adapter, ready, rejected, run)
