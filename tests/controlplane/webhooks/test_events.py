"""What becomes an event: with the change it tells, and only with it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from controlplane.adapters import promotion, services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.errors import Conflict
from controlplane.events.outbox.models import EventType, OutboxEvent
from controlplane.events.outbox.services import publish
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import Dataset, TrainingRun
from controlplane.training.runs import endings
from controlplane.usage.limits import budget_events
from controlplane.usage.limits.models import Budget
from controlplane.usage.limits.services import budget_set
from controlplane.usage.models import UsageDay
from controlplane.webhooks import tasks
from tests.controlplane.adapters import files
from tests.controlplane.adapters.test_ingest import upload, validate
from tests.controlplane.conftest import Party
from tests.controlplane.webhooks.conftest import Hook


@pytest.fixture
def inside(acme: Party) -> Iterator[Party]:
    with tenant_scope(acme.tenant.id):
        yield acme


def told() -> list[tuple[str, Any]]:
    rows = OutboxEvent.objects.order_by("created_at", "pk")
    return list(rows.values_list("type", "data"))


@pytest.mark.django_db(transaction=True)
def test_an_event_needs_its_change() -> None:
    with pytest.raises(transaction.TransactionManagementError):
        publish(EventType.VERSION_READY)


def test_a_change_that_is_undone_is_not_told(inside: Party) -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        publish(EventType.VERSION_READY)
        raise RuntimeError
    assert told() == []


def test_checks_promotions_and_rollbacks_are_told(inside: Party, base_model: BaseModel) -> None:
    first, second = validate(upload()), validate(upload())
    bad = validate(upload(config=files.config_bytes(use_dora=True)))
    promotion.adapter_version_promote(version=second, reason="better")
    promotion.adapter_roll_back(adapter=second.adapter)
    with pytest.raises(Conflict):
        promotion.adapter_version_promote(version=bad)
    services.model_delete(first.adapter.name)
    kinds = [type for type, _ in told()]
    assert kinds == [
        *("version.ready", "version.promoted", "version.ready", "version.rejected"),
        *("version.promoted", "version.rolled_back", "version.rolled_back"),
    ]
    data = [data for _, data in told()]
    name = first.adapter.name
    assert data[0] == {"adapter": name, "version": 1, "digest": first.digest}
    assert data[3]["version"] == 3 and data[3]["reasons"] == bad.reasons != []
    assert data[4] == {
        "adapter": name,
        "version": 2,
        "previous_version": 1,
        "cause": "promoted",
        "reason": "better",
    }
    assert (data[5]["version"], data[5]["cause"]) == (1, "rolled_back")
    assert data[6]["cause"] == "retired"


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled"])
def test_a_runs_end_is_told_unless_somebody_cancelled_it(
    inside: Party, base_model: BaseModel, status: str
) -> None:
    adapter = Adapter.objects.create(name="invoices", base_model=base_model)
    version = AdapterVersion.objects.create(adapter=adapter, number=4)
    run = TrainingRun.objects.create(
        adapter=adapter,
        dataset=Dataset.objects.create(name="chats", sha256="a" * 64, num_bytes=1, num_rows=1),
        dataset_sha256="a" * 64,
        status=TrainingRun.Status.RUNNING,
        version=version,
    )
    for _ in range(2):  # the second finds that it has ended
        endings.run_finish(
            run, TrainingRun.Status.RUNNING, TrainingRun.Status(status), endings.Fault("why", "")
        )
    known = {"training_run": str(run.pk), "adapter": "invoices"}
    assert (
        told()
        == {
            "succeeded": [("training_run.succeeded", {**known, "version": 4})],
            "failed": [("training_run.failed", {**known, "error": "why"})],
            "cancelled": [],
        }[status]
    )


class TestBudgets:
    @staticmethod
    def spend(party: Party, tokens: int, *, key: bool = False, days: int = 0) -> None:
        day = timezone.now().astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        UsageDay.objects.create(
            starts_at=day - dt.timedelta(days=days),
            model=f"m{UsageDay.objects.count()}",
            api_key_id=party.api_key.pk if key else None,
            requests=1,
            cached_tokens=0,
            prompt_tokens=tokens - 1,
            completion_tokens=1,
        )

    def test_each_limit_is_told_once_a_period(self, inside: Party) -> None:
        budget = budget_set(period="day", soft_limit=100, hard_limit=200)
        self.spend(inside, 99)
        self.spend(inside, 500, days=1)  # of another period
        assert budget_events.budgets_check() == 0
        self.spend(inside, 2)
        assert [budget_events.budgets_check() for _ in range(2)] == [1, 0]
        self.spend(inside, 95)  # 196: near enough that requests are refused
        assert [budget_events.budgets_check() for _ in range(2)] == [1, 0]
        (kind, soft), (_, hard) = told()
        assert kind == "budget.reached"
        assert (soft["limit"], soft["tokens"], soft["spent"]) == ("soft", 100, 101)
        assert (hard["limit"], hard["tokens"], hard["spent"]) == ("hard", 200, 196)
        assert soft["budget"] == str(budget.pk) and soft["api_key"] is None
        budget_set(period="day", soft_limit=150, hard_limit=1000)
        assert [budget_events.budgets_check() for _ in range(2)] == [1, 0]
        yesterday = timezone.now() - dt.timedelta(days=1)
        Budget.objects.update(soft_told_for=yesterday)
        assert budget_events.budgets_check() == 1  # the next period
        budget_set(period="day", soft_limit=150, hard_limit=1000)  # as it was
        assert budget_events.budgets_check() == 0

    def test_a_keys_budget_counts_the_key_alone(self, inside: Party) -> None:
        budget_set(period="month", soft_limit=100, api_key_id=inside.api_key.pk)
        self.spend(inside, 500)
        assert budget_events.budgets_check() == 0
        self.spend(inside, 100, key=True)
        assert budget_events.budgets_check() == 1
        assert told()[0][1]["api_key"] == inside.api_key.public_id

    def test_another_tenants_use_does_not_count(self, inside: Party, globex: Party) -> None:
        budget_set(period="month", soft_limit=100)
        with tenant_scope(globex.tenant.id):
            self.spend(globex, 500)
        assert budget_events.budgets_check() == 0


@pytest.mark.django_db(transaction=True)
def test_a_commit_wakes_the_deliverer(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real broker; here the test is the worker."""
    sent = []
    monkeypatch.setattr(tasks.webhooks_deliver, "delay", lambda: sent.append(1))
    with tenant_scope(hook.endpoint.tenant_id):
        with pytest.raises(RuntimeError), transaction.atomic():
            publish(EventType.VERSION_READY, version=1)
            raise RuntimeError
        assert sent == []
        with transaction.atomic():
            publish(EventType.VERSION_READY, version=2)
    assert sent == [1]
    monkeypatch.undo()
    tasks.webhooks_deliver()
    assert [row.status for row in hook.deliveries()] == ["succeeded"]
    tasks.webhooks_deliver()  # its turn has ended: the next can begin
    assert len(hook.received) == 1
