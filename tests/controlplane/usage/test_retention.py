"""Usage records lie in months: old ones are dropped whole, and the totals stay."""

from __future__ import annotations

import datetime as dt
import importlib
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import OperationalError, ProgrammingError, connection, transaction
from django.utils import timezone

from controlplane.tenancy.database.ownership import as_owner, grant_rights
from controlplane.tenancy.scope import OPERATOR_ROLE
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage import retention
from controlplane.usage.models import UsageDay, UsageRecord
from controlplane.usage.services import usage_records_create
from controlplane.usage.totals import usage_drift, usage_totals_rebuild
from tests.controlplane.conftest import Party, make_party

partitions = importlib.import_module("controlplane.usage.migrations.0003_partitions")

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


@pytest.mark.django_db(transaction=True)
def test_a_table_with_rows_becomes_the_first_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The migration, on a table as it was; also when it was killed before, or a backup runs."""
    monkeypatch.setattr(partitions, "LOCK_TIMEOUT_S", 1)
    monkeypatch.setattr(partitions, "MAX_TRIES", 1)
    acme = make_party("acme")
    write(record(acme, "a", timezone.now()), record(acme, "b", timezone.now() - 20 * MONTH))
    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute(AS_BEFORE)
        grant_rights(connection)
        cursor.execute("alter table usage_usagerecord add constraint usage_before check (true)")
        with connection.schema_editor(atomic=False) as editor:
            parameters = connection.get_connection_params()
            with psycopg.connect(**parameters) as reader, pytest.raises(OperationalError):
                reader.execute("lock table usage_usagerecord in access share mode")
                partitions.partition(None, editor)
            partitions.partition(None, editor)
            partitions.partition(None, editor)
    assert requests_of(acme) == ["b", "a"]
    assert partition_of("a") == partition_of("b") == "usage_usagerecord_before"
    write(record(acme, "a", timezone.now()), record(acme, "c", timezone.now()))
    assert requests_of(acme) == ["b", "a", "c"]
    with as_owner(connection):
        grant_rights(connection)  # as at the end of all migrations
    assert usage_drift() == []


#: The partitioned table becomes the plain one that it was before the migration.
AS_BEFORE = """
alter table usage_usagerecord no force row level security;
alter table usage_usagerecord_before no force row level security;
create table plain (like usage_usagerecord including defaults);
insert into plain select * from usage_usagerecord;
drop table usage_usagerecord cascade;
alter table plain rename to usage_usagerecord;
alter table usage_usagerecord add primary key (id), add unique (request_id),
  add foreign key (tenant_id) references tenants_tenant (id) deferrable initially deferred;
create index on usage_usagerecord (tenant_id, occurred_at);
alter table usage_usagerecord enable row level security;
alter table usage_usagerecord force row level security;
"""
