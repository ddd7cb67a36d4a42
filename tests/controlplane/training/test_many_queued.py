"""Thousands of queued runs: few messages, few queries, and each tenant's turn."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.adapters.services import adapter_create
from controlplane.infra.metrics import TRAINING_MESSAGES
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.services import tenant_create
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import TrainingRun
from controlplane.training.runs import (
    execution,
    lost_runs,
    picking,
    sending,
)
from controlplane.training.runs import (
    services as run_services,
)
from controlplane.usage.limits import quotas
from controlplane.usage.models import TrainingUsage
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.training.conftest import FAST, ROWS

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def broker() -> Iterator[Any]:
    """The real one; what other tests sent for is not waited for."""
    with redis.Redis.from_url(django_settings.CELERY_BROKER_URL) as client:
        client.delete(sending.QUEUE)
        yield client
        client.delete(sending.QUEUE)


def queue_runs(adapter: Adapter, number: int) -> list[TrainingRun]:
    """As a night of schedules leaves them, in the tenant's scope."""
    return TrainingRun.objects.bulk_create(
        TrainingRun(adapter=adapter, dataset_sha256="0" * 64, hyperparameters=FAST, num_rows=8)
        for _ in range(number)
    )


def night(number: int, base: BaseModel, num_tenants: int = 10) -> None:
    for place in range(num_tenants):
        tenant = tenant_create(slug=f"night-{place}", name="Night")
        with tenant_scope(tenant.id):
            adapter = adapter_create(name="nightly", base_model_name=base.name)
            for run in queue_runs(adapter, number // num_tenants):
                sending.run_send(run)


def deliver(broker: Any) -> bool:
    """What a trainer does with a message, but for the training."""
    if broker.lpop(sending.QUEUE) is None:
        return False
    run = picking.run_claim_next()
    if run is not None:
        with tenant_scope(run.tenant_id):
            TrainingRun.objects.filter(pk=run.pk).update(status="succeeded")
        execution.send_waiting()
    return True


def sent() -> float:
    return float(TRAINING_MESSAGES._value.get())


def ended() -> int:
    with all_tenants(reason="test"):
        return TrainingRun.objects.filter(status="succeeded").count()


@pytest.mark.parametrize("delivered", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_night_of_5000_runs_sends_one_message_for_each(
    tiny_base: BaseModel, broker: Any, delivered: int
) -> None:
    """However often the tick looks; and all are trained, also after Redis lost what it had."""
    before = sent()
    night(5000, tiny_base)
    assert broker.llen(sending.QUEUE) == sending.MAX_WAITING == sent() - before
    for number in range(delivered):
        if number % 20 == 0:
            lost_runs.training_runs_reconcile()
            assert broker.llen(sending.QUEUE) <= sending.MAX_WAITING
        if not deliver(broker):
            break
    assert ended() == min(delivered, 5000)
    assert sent() - before <= ended() + sending.MAX_WAITING
    if ended() < 5000:
        broker.delete(sending.QUEUE)
        lost_runs.training_runs_reconcile()
        assert broker.llen(sending.QUEUE) == sending.MAX_WAITING
        assert deliver(broker)


def test_dispatch_asks_as_little_of_5000_runs_as_of_50(tiny_base: BaseModel, broker: Any) -> None:
    def queries() -> list[int]:
        counts = []
        for do in (lost_runs.training_runs_reconcile, picking.run_claim_next):
            with CaptureQueriesContext(connection) as captured:
                do()
            counts.append(len(captured))
        return counts

    night(50, tiny_base)
    few = queries()
    with all_tenants(reason="test"):
        adapters = list(Adapter.objects.all())
    for adapter in adapters:
        with tenant_scope(adapter.tenant_id):
            queue_runs(adapter, 495)
    assert queries() == few and max(few) < 25


def test_a_thousand_runs_of_one_tenant_delay_anothers_by_one(
    acme: Party, globex: Party, tiny_base: BaseModel, broker: Any
) -> None:
    adapters = {}
    for party in (acme, globex):
        with tenant_scope(party.tenant.id):
            adapters[party.tenant.slug] = adapter_create(
                name="greeter", base_model_name=tiny_base.name
            )
    with tenant_scope(acme.tenant.id):
        queue_runs(adapters["acme"], 1000)
    began: list[Any] = []
    for number in range(8):
        if number % 2 == 1:  # it comes while one of the thousand is trained
            with tenant_scope(globex.tenant.id):
                queue_runs(adapters["globex"], 1)
        run = picking.run_claim_next()
        assert run is not None
        began.append(run.tenant_id)
        with tenant_scope(run.tenant_id):
            TrainingRun.objects.filter(pk=run.pk).update(status="succeeded")
    assert began == [acme.tenant.id, globex.tenant.id] * 4


class TestDeviceSeconds:
    @pytest.fixture
    def run(self, acme: Party, tiny_base: BaseModel) -> TrainingRun:
        with tenant_scope(acme.tenant.id):
            dataset_services.dataset_upload(name="chats", content=ROWS)
            adapter_create(name="greeter", base_model_name=tiny_base.name)
            return run_services.training_run_create(adapter_name="greeter", dataset_name="chats")

    def use(self, run: TrainingRun, seconds: int, **ago: Any) -> None:
        with tenant_scope(run.tenant_id):
            TrainingUsage.objects.create(
                run_id=run.pk,
                attempt=TrainingUsage.objects.count() + 1,
                trained_tokens=0,
                device="H200",
                is_gpu=True,
                device_ms=seconds * 1000,
                occurred_at=timezone.now() - dt.timedelta(**ago),
            )

    def test_a_tenant_that_used_them_up_waits_is_told_and_begins_later(
        self, run: TrainingRun, acme: Party, globex: Party, broker: Any
    ) -> None:
        with tenant_scope(run.tenant_id):
            quotas.quota_set(training_device_seconds=100)
        self.use(run, 1000, hours=25)
        self.use(run, 60, hours=23)
        assert picking.next_run() == run
        self.use(run, 40, hours=1)
        assert picking.next_run() is None
        assert not execution.training_next()
        for _ in range(3):
            lost_runs.training_runs_reconcile()
        with tenant_scope(run.tenant_id):
            run.refresh_from_db()
            [told] = run.events.filter(level="warn")
        assert (run.status, told.data["code"]) == ("queued", "device_seconds_used_up")
        assert "100 device seconds" in told.message
        shown = as_key(acme).get("/api/v1/quota").json()["training_device_seconds"]
        assert shown == {"limit": 100, "used": 100}
        assert as_key(globex).get("/api/v1/quota").json()["training_device_seconds"]["used"] == 0
        with tenant_scope(run.tenant_id):
            TrainingUsage.objects.filter(device_ms=60_000).update(
                occurred_at=timezone.now() - picking.QUOTA_WINDOW
            )
        assert picking.next_run() == run
