"""Totals by hour and day are the sums of the records, however those came to be."""

from __future__ import annotations

import datetime as dt
import random
import threading
import uuid
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from contract.messages.protocol import DoneRecord
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits.services import budget_period, budget_set, tokens_spent
from controlplane.usage.models import UsageDay, UsageHour, UsageRecord
from controlplane.usage.services import usage_settle
from controlplane.usage.totals import usage_drift
from tests.controlplane.conftest import Party
from tests.controlplane.queue.test_accountant import record

START = dt.datetime(2026, 3, 1, 22, tzinfo=dt.UTC).timestamp()


def some(chance: random.Random, count: int, *parties: Party) -> list[DoneRecord]:
    """Records of a few hours about midnight, models and keys, some of them reported twice."""
    return [
        record(
            chance.choice(parties),
            f"req_{chance.randrange(count)}",
            model=chance.choice(("m", "n")),
            api_key_id=chance.choice((None, str(uuid.UUID(int=1)), str(uuid.UUID(int=2)))),
            created_at=START + chance.randrange(4 * 3600),
            prompt_tokens=chance.randrange(100),
            completion_tokens=chance.randrange(100),
        )
        for _ in range(count)
    ]


def num_counted(kind: type[UsageHour] | type[UsageDay]) -> int:
    with all_tenants(reason="to see everything"):
        return sum(kind.objects.values_list("requests", flat=True))


def num_records() -> int:
    with all_tenants(reason="to see everything"):
        return UsageRecord.objects.count()


def test_totals_are_the_sums_of_the_records(acme: Party, globex: Party) -> None:
    chance = random.Random(0)
    for _ in range(5):
        usage_settle(some(chance, 200, acme, globex))
    assert usage_drift() == []
    assert num_counted(UsageHour) == num_counted(UsageDay) == num_records() > 150
    with tenant_scope(acme.tenant.id):
        hours = set(UsageHour.objects.values_list("starts_at", flat=True))
        assert {hour.hour for hour in hours} == {22, 23, 0, 1}
        days = UsageDay.objects.values_list("starts_at", flat=True).distinct()
        assert sorted(day.day for day in days) == [1, 2]


def test_a_request_is_counted_once_however_often_it_is_reported(acme: Party) -> None:
    once = record(acme, "req_1")
    usage_settle([once, once])
    usage_settle([once, record(acme, "req_2")])
    with tenant_scope(acme.tenant.id):
        (total,) = UsageDay.objects.all()
    assert (total.requests, total.prompt_tokens, total.completion_tokens) == (2, 22, 14)


@pytest.mark.django_db(transaction=True)
def test_what_is_rolled_back_is_not_counted(acme: Party) -> None:
    bad = record(acme, "req_bad", prompt_tokens=2**40)
    with pytest.raises(Exception, match="out of range"):
        usage_settle([record(acme, "req_1"), bad])
    assert num_counted(UsageHour) == num_counted(UsageDay) == num_records() == 0


@pytest.mark.django_db(transaction=True)
def test_accountants_that_settle_the_same_at_once_count_it_once(acme: Party) -> None:
    records = {item.request_id: item for item in some(random.Random(1), 400, acme)}
    errors: list[BaseException] = []

    def settle(seed: int) -> None:
        # By request, as two streams would be read; a circle of waiting would be an error.
        mine = sorted(records.values(), key=lambda item: item.request_id)
        try:
            for at in range(0, len(mine), 10 + seed):
                usage_settle(mine[at : at + 10 + seed])
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=settle, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert usage_drift() == []
    assert num_counted(UsageHour) == num_records() == len(records)


def test_the_command_finds_what_is_wrong_and_makes_it_right(acme: Party, globex: Party) -> None:
    usage_settle(some(random.Random(2), 50, acme, globex))
    call_command("usage_totals")
    with tenant_scope(acme.tenant.id):
        total = UsageDay.objects.all()[0]
        UsageDay.objects.filter(pk=total.pk).update(requests=total.requests + 1)
        UsageHour.objects.all()[0].delete()
    out = StringIO()
    with pytest.raises(CommandError, match="3 totals"):
        call_command("usage_totals", stdout=out)
    assert out.getvalue().count('"width": "day"') == 2
    call_command("usage_totals", "--rebuild")
    assert usage_drift() == []
    assert num_counted(UsageDay) == num_records()


def test_a_budget_that_redis_forgot_is_read_from_the_totals(acme: Party) -> None:
    now = dt.datetime.fromtimestamp(START, tz=dt.UTC)
    usage_settle([record(acme, f"req_{n}", created_at=START) for n in range(3)])
    usage_settle([record(acme, "req_tomorrow", created_at=START + 3 * 3600)])
    with tenant_scope(acme.tenant.id):
        by_tenant = budget_set(period="day", hard_limit=100)
        by_key = budget_set(period="month", hard_limit=100, api_key_id=acme.api_key.id)
    tenant_id = str(acme.tenant.id)
    assert tokens_spent(tenant_id, budget_period(by_tenant, now)) == 3 * 18
    assert tokens_spent(tenant_id, budget_period(by_key, now)) == 4 * 18
