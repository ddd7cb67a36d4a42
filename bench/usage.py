"""Measure whether usage records cost more when there are more of them.

    python -m bench.usage [--records 500000 4000000] [--out FILE]

PostgreSQL is real, and so is the code that writes, reads and drops; only the rows of the past are
made in SQL. Each size is spread over a year of partitions and 500 tenants. Measured: a batch of 500
records of an accountant, a tenant's sum of its last day, the usage of one request, and the drop of
the oldest month. Prints a line of JSON for each size and writes bench/results/usage.json.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import environment
from demo.stack import EmbeddedStack
from tests.database import migrated_database

RESULTS = Path(__file__).parent / "results" / "usage.json"
NUM_TENANTS = 500
MONTHS = 12
BATCH = 500
REPEAT = 20

FILL = """
insert into usage_usagerecord (id, created_at, tenant_id, request_id, model, base_model,
  prompt_tokens, cached_tokens, completion_tokens, finish_reason, occurred_at)
select gen_random_uuid(), now(), (array(select id from tenants_tenant))[1 + n %% %(tenants)s],
  'req_' || md5(n::text || %(month)s::text), 'tiny', 'tiny', 100, 0, 50, 'stop',
  %(start)s::timestamptz + (n %% 27) * interval '1 day' + (n %% 86400) * interval '1 second'
from generate_series(1, %(rows)s) n
"""


def measure(num_records: int) -> dict[str, Any]:
    """Fill a year with records, and time what an installation does with them."""
    from django.db import connection
    from django.db.models import Sum

    from controlplane.tenancy.database.ownership import as_owner
    from controlplane.tenancy.scoping import all_tenants, tenant_scope
    from controlplane.tenants.models import Tenant
    from controlplane.usage import retention
    from controlplane.usage.models import UsageRecord
    from controlplane.usage.services import usage_records_create

    now = dt.datetime.now(dt.UTC)
    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute("truncate usage_usagerecord, usage_usagehour, usage_usageday")
        months = _year_of_partitions(cursor, now)
    Tenant.objects.bulk_create(
        [Tenant(slug=f"t{n}", name="t") for n in range(NUM_TENANTS)], ignore_conflicts=True
    )
    tenants = list(Tenant.objects.all())
    with all_tenants(reason="bench"), connection.cursor() as cursor:
        for month, start in enumerate(months):
            rows = num_records // MONTHS
            values = {"tenants": NUM_TENANTS, "month": month, "start": start, "rows": rows}
            cursor.execute(FILL, values)
    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute("vacuum analyze usage_usagerecord")

    def write() -> None:
        with all_tenants(reason="bench"):
            usage_records_create(
                [
                    UsageRecord(
                        tenant=tenants[n % NUM_TENANTS],
                        request_id=f"req_{uuid.uuid4().hex}",
                        model="tiny",
                        base_model="tiny",
                        prompt_tokens=100,
                        completion_tokens=50,
                        finish_reason="stop",
                        occurred_at=now,
                    )
                    for n in range(BATCH)
                ]
            )

    def read() -> None:
        with tenant_scope(tenants[0].pk):
            since = now - dt.timedelta(days=1)
            rows = UsageRecord.objects.filter(occurred_at__gte=since, occurred_at__lt=now)
            rows.aggregate(Sum("prompt_tokens"))

    def find() -> None:
        with tenant_scope(tenants[0].pk):
            UsageRecord.objects.filter(request_id=f"req_{uuid.uuid4().hex}").first()

    result = {
        "records": num_records,
        "write_500_ms": _median_ms(write),
        "tenant_day_ms": _median_ms(read),
        "one_request_ms": _median_ms(find),
    }
    started = time.perf_counter()
    dropped = retention.usage_forget(now=months[1] + dt.timedelta(days=400))
    result["drop_month_ms"] = round((time.perf_counter() - started) * 1000, 2)
    assert len(dropped) == 1, dropped
    return result


def _year_of_partitions(cursor: Any, now: dt.datetime) -> list[dt.datetime]:
    """Make a partition for each of the last months. -> their starts, the oldest first."""
    cursor.execute("drop table if exists usage_usagerecord_before")
    cursor.execute("select min(start) from usage_partitions where partition not like '%\\_t%'")
    stops = [cursor.fetchone()[0]]
    while len(stops) <= MONTHS:
        stops.append((stops[-1] - dt.timedelta(days=1)).replace(day=1))
    stops.reverse()
    for number in range(MONTHS):
        start, stop = stops[number].isoformat(), stops[number + 1].isoformat()
        name = f"usage_usagerecord_t{number}"
        cursor.execute(f"drop table if exists {name}")
        cursor.execute(
            f"create table {name} partition of usage_usagerecord "
            f"for values from ('{start}') to ('{stop}')"
        )
        cursor.execute(f"select usage_partition_protect('{name}')")
        cursor.execute(f"grant all on {name} to lorikeet_operator")
    return stops[:-1]


def _median_ms(work: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEAT):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1000)
    return round(statistics.median(times), 2)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, nargs="+", default=[500_000, 4_000_000])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    report = environment("bench.usage")
    folder = Path(tempfile.mkdtemp(prefix="bench-usage-"))
    stack = EmbeddedStack(folder, durable=False)
    os.environ.update(stack.env)
    try:
        stack.start()
        os.environ.update(migrated_database(stack.env, "bench_usage"))
        os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
        import django

        django.setup()
        report["sizes"] = []
        for num_records in args.records:
            report["sizes"].append(measure(num_records))
            print(json.dumps(report["sizes"][-1]))
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
