"""Usage records lie in months: old ones are dropped whole, and the totals stay."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.conf import settings
from django.db import ProgrammingError, connection, transaction
from django.utils import timezone

from controlplane.tenancy.database.ownership import as_owner
from controlplane.tenancy.scope import OPERATOR_ROLE
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage import retention
from controlplane.usage.models import UsageDay, UsageRecord
from controlplane.usage.services import usage_records_create
from controlplane.usage.totals import usage_drift, usage_totals_rebuild
from tests.controlplane.conftest import Party, make_party

MONTH = dt.timedelta(days=31)


def record(party: Party, name: str, at: dt.datetime) -> UsageRecord:
    return UsageRecord(
        tenant=party.tenant,
        request_id=name,
        model="tiny",
        base_model="tiny",
        prompt_tokens=10,
        completion_tokens=5,
        finish_reason="stop",
        occurred_at=at,
    )


def write(*rows: UsageRecord) -> None:
    with all_tenants(reason="test"):
        usage_records_create(rows)


def requests_of(party: Party) -> list[str]:
    with tenant_scope(party.tenant.pk):
        return list(
            UsageRecord.objects.order_by("occurred_at").values_list("request_id", flat=True)
        )


def partition_of(name: str) -> str:
    with all_tenants(reason="test"), connection.cursor() as cursor:
        cursor.execute(
            "select tableoid::regclass::text from usage_usagerecord where request_id = %s", (name,)
        )
        return str(cursor.fetchone()[0])


@pytest.mark.django_db
def test_a_month_is_dropped_when_all_of_it_is_too_old(settings: Any) -> None:
    settings.USAGE_DAYS = 31
    acme = make_party("acme")
    now = timezone.now()
    retention.usage_forget(now=now)
    write(record(acme, "now", now), record(acme, "later", now + 3 * MONTH))
    assert partition_of("now") != partition_of("later")
    with pytest.raises(ProgrammingError), transaction.atomic():
        retention.usage_forget(now=now + 2 * MONTH)  # its usage is not old: the clock is wrong
    assert requests_of(acme) == ["now", "later"]


@pytest.mark.django_db
def test_a_new_month_has_the_rights_of_the_others() -> None:
    """Without them the backup, which reads each partition by its name, fails."""
    with connection.cursor() as cursor:
        cursor.execute("select partition from usage_partitions")
        before = {name for (name,) in cursor.fetchall()}
        retention.usage_forget(now=timezone.now() + MONTH)
        cursor.execute("select partition from usage_partitions")
        new = {name for (name,) in cursor.fetchall()} - before
        assert new
        for role in (OPERATOR_ROLE, settings.DATABASE_APPLICATION_ROLE):
            for name in new:
                cursor.execute(
                    "select bool_and(has_table_privilege(%s, %s, privilege)) from "
                    "unnest(array['select', 'insert', 'update', 'delete']) as privilege",
                    (role, name),
                )
                assert cursor.fetchone() == (True,), (role, name)


@pytest.mark.django_db(transaction=True)
def test_the_totals_of_dropped_months_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    acme = make_party("acme")
    now = timezone.now()
    with as_owner(connection), connection.cursor() as cursor:
        # As if it were a year later: the first months are a year old.
        cursor.execute("drop table usage_usagerecord_before")
        first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0) - 12 * MONTH
        first = first.replace(day=1)
        second = (first + 32 * dt.timedelta(days=1)).replace(day=1)
        for number, (start, stop) in enumerate(((first, second), (second, now + MONTH / 31))):
            cursor.execute(
                f"create table usage_usagerecord_t{number} partition of usage_usagerecord "
                f"for values from ('{start.isoformat()}') to ('{stop.isoformat()}')"
            )
            cursor.execute(f"select usage_partition_protect('usage_usagerecord_t{number}')")
    try:
        old, new = first + dt.timedelta(days=3), now
        write(record(acme, "old", old), record(acme, "new", new))
        assert usage_drift() == []
        dropped = retention.usage_forget(now=second + dt.timedelta(days=401))
        assert dropped == ["usage_usagerecord_t0"]
        assert requests_of(acme) == ["new"]
        with tenant_scope(acme.tenant.pk):
            assert UsageDay.objects.count() == 2
        assert usage_drift() == []
        usage_totals_rebuild()
        with tenant_scope(acme.tenant.pk):
            assert UsageDay.objects.count() == 2
    finally:
        restore_partitions()


def restore_partitions() -> None:
    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute("drop table if exists usage_usagerecord_t0, usage_usagerecord_t1")
        cursor.execute("select min(start) from usage_partitions")
        (stop,) = cursor.fetchone()
        cursor.execute(
            "create table usage_usagerecord_before partition of usage_usagerecord "
            f"for values from (minvalue) to ('{stop.isoformat()}')"
        )
        cursor.execute("select usage_partition_protect('usage_usagerecord_before')")


@pytest.mark.django_db
def test_a_record_of_no_month_is_written_and_counted_once() -> None:
    acme = make_party("acme")
    far = timezone.now() + 60 * MONTH
    write(record(acme, "far", far))
    write(record(acme, "far", far + dt.timedelta(seconds=1)))
    assert partition_of("far") == "usage_usagerecord_other"
    assert requests_of(acme) == ["far"]
    retention.usage_forget(now=timezone.now())  # it makes no month over those rows
    assert usage_drift() == []
