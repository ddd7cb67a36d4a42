"""Totals of usage by hour and day: updated as records are written, and checked against them.

The transaction that inserts a record also adds it to the totals, so they always agree.
`usage_drift` checks that, `usage_totals_rebuild` recomputes them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import connection, transaction

from controlplane.tenancy.scoping import all_tenants, current_tenant_id, new_id
from controlplane.usage.models import UsageDay, UsageHour, UsageRecord, UsageTotal

TOTALS: tuple[tuple[type[UsageTotal], str], ...] = ((UsageHour, "hour"), (UsageDay, "day"))
_KEY = "tenant_id, starts_at, model, api_key_id"
_SUMS = "requests, prompt_tokens, cached_tokens, completion_tokens"

_ADD = """
insert into {table} (id, created_at, {key}, {sums})
select * from unnest(
  %s::uuid[], %s::timestamptz[], %s::uuid[], %s::timestamptz[], %s::text[], %s::uuid[],
  %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
on conflict ({key}) do update set
  requests = {table}.requests + excluded.requests,
  prompt_tokens = {table}.prompt_tokens + excluded.prompt_tokens,
  cached_tokens = {table}.cached_tokens + excluded.cached_tokens,
  completion_tokens = {table}.completion_tokens + excluded.completion_tokens
"""

_FROM_RECORDS = """
select tenant_id, date_trunc('{width}', occurred_at, 'UTC') as starts_at, model, api_key_id,
  count(*) as requests, sum(prompt_tokens)::bigint as prompt_tokens,
  sum(cached_tokens)::bigint as cached_tokens, sum(completion_tokens)::bigint as completion_tokens
from usage_usagerecord where {checked} and occurred_at >= '{since}' group by 1, 2, 3, 4
"""
#: Deleted tenants are excluded, because only totals are left of them.
_CHECKED = (
    "tenant_id not in (select id from tenants_tenant where status in ('deleting', 'deleted'))"
)

# Symmetric difference: a wrong total appears on both sides. One statement, so one snapshot.
_DRIFT = """
with total as (
  select {key}, {sums} from {table} where {checked} and starts_at >= '{since}'
), expected as ({from_records})
(select 'total', * from (select * from total except select * from expected) s)
union all
(select 'records', * from (select * from expected except select * from total) t)
order by 2, 3, 4, 5, 1
limit 1000
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """A total that differs from its records, or is missing."""

    width: str
    #: "total": these sums are in the table; "records": these sums should be there.
    source: str
    tenant_id: str
    starts_at: dt.datetime
    model: str
    api_key_id: str | None
    #: requests, prompt, cached and completion tokens
    sums: tuple[int, int, int, int]


def usage_totals_add(records: Sequence[UsageRecord]) -> None:
    """Add new records to the totals, in the transaction that inserted them."""
    for model, width in TOTALS:
        sums: dict[tuple[Any, ...], list[int]] = {}
        for row in records:
            key = (row.tenant_id, _floor(row.occurred_at, width), row.model, row.api_key_id)
            counts = sums.setdefault(key, [0, 0, 0, 0])
            counts[0] += 1
            counts[1] += row.prompt_tokens
            counts[2] += row.cached_tokens
            counts[3] += row.completion_tokens
        if sums:
            _add(model, sums)


def _add(model: type[UsageTotal], sums: dict[tuple[Any, ...], list[int]]) -> None:
    # In a fixed order, so that two accountants cannot deadlock.
    keys = sorted(sums, key=lambda key: tuple(map(str, key)))
    now = dt.datetime.now(dt.UTC)
    columns: list[list[Any]] = [[new_id() for _ in keys], [now] * len(keys)]
    columns += [[key[index] for key in keys] for index in range(4)]
    columns += [[sums[key][index] for key in keys] for index in range(4)]
    with connection.cursor() as cursor:
        cursor.execute(_ADD.format(table=model._meta.db_table, key=_KEY, sums=_SUMS), columns)


def _floor(moment: dt.datetime, width: str) -> dt.datetime:
    hour = moment.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0)
    return hour if width == "hour" else hour.replace(hour=0)


_FORGET_NAMES = """
with named as (
  delete from usage_usageday where tenant_id = %(tenant)s
    and (api_key_id is not null or model <> all(%(kept)s)) returning *
), base as (select * from unnest(%(names)s::text[], %(bases)s::text[]) as b (name, base))
insert into usage_usageday (id, created_at, {key}, {sums})
select gen_random_uuid(), now(), tenant_id, starts_at, {model}, null,
  sum(requests)::bigint, sum(prompt_tokens)::bigint, sum(cached_tokens)::bigint,
  sum(completion_tokens)::bigint
from named left join base on base.name = split_part(named.model, '@', 1)
group by tenant_id, starts_at, {model}
on conflict ({key}) do update set
  requests = usage_usageday.requests + excluded.requests,
  prompt_tokens = usage_usageday.prompt_tokens + excluded.prompt_tokens,
  cached_tokens = usage_usageday.cached_tokens + excluded.cached_tokens,
  completion_tokens = usage_usageday.completion_tokens + excluded.completion_tokens
"""
#: The model in the totals of usage whose adapter is unknown.
UNKNOWN_ADAPTER = "(adapter)"


def usage_forget_names(bases: Mapping[str, str], base_models: Iterable[str]) -> None:
    """Replace adapters by base models in the days of the tenant in scope, and remove its keys.

    bases        adapter name -> name of its base model
    base_models  the names of all base models, which stay
    """
    kept = [*base_models, UNKNOWN_ADAPTER]
    names = {**{name: name for name in kept}, **bases}
    values: dict[str, Any] = {
        "tenant": current_tenant_id(),
        "kept": kept,
        "names": list(names),
        "bases": list(names.values()),
    }
    model = f"coalesce(base.base, '{UNKNOWN_ADAPTER}')"
    with connection.cursor() as cursor:
        cursor.execute(_FORGET_NAMES.format(key=_KEY, sums=_SUMS, model=model), values)


def _kept_since(cursor: Any) -> str:
    """Return the time of the first records; earlier totals stay as they are."""
    cursor.execute(
        "select bool_or(start is null and stop is not null), min(start) from usage_partitions"
    )
    has_all, start = cursor.fetchone()
    return "-infinity" if has_all or start is None else start.isoformat()


def _from_records(width: str, since: str) -> str:
    return _FROM_RECORDS.format(width=width, checked=_CHECKED, since=since)


def usage_drift() -> list[Drift]:
    """Return totals of all tenants that differ from their records; at most 1,000 per width."""
    found = []
    with all_tenants(reason="check the totals of all tenants"), connection.cursor() as cursor:
        since = _kept_since(cursor)
        for model, width in TOTALS:
            table = model._meta.db_table
            cursor.execute(
                _DRIFT.format(
                    table=table,
                    key=_KEY,
                    sums=_SUMS,
                    checked=_CHECKED,
                    since=since,
                    from_records=_from_records(width, since),
                )
            )
            found += [
                Drift(
                    width=width,
                    source=row[0],
                    tenant_id=str(row[1]),
                    starts_at=row[2],
                    model=row[3],
                    api_key_id=str(row[4]) if row[4] else None,
                    sums=(row[5], row[6], row[7], row[8]),
                )
                for row in cursor.fetchall()
            ]
    return found


def usage_totals_rebuild() -> None:
    """Recompute the totals from the records. Accountants wait for it; nothing is lost."""
    with (
        all_tenants(reason="recompute the totals of all tenants"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        tables = ", ".join(model._meta.db_table for model, _ in TOTALS)
        cursor.execute(f"lock table {tables} in share row exclusive mode")
        since = _kept_since(cursor)
        for model, width in TOTALS:
            table = model._meta.db_table
            cursor.execute(f"delete from {table} where {_CHECKED} and starts_at >= '{since}'")
            cursor.execute(
                f"insert into {table} (id, created_at, {_KEY}, {_SUMS}) "
                f"select gen_random_uuid(), now(), * from ({_from_records(width, since)}) r"
            )
