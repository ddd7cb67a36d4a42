"""Count requests that were refused at admission, by hour."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from django.db import connection

from controlplane.requestlog.models import RefusalHour
from controlplane.tenancy.scoping import all_tenants, new_id
from controlplane.tenants.models import Tenant


class RefusalKey(NamedTuple):
    """Refusals with the same key are counted together."""

    tenant_id: uuid.UUID
    hour: dt.datetime
    endpoint: str
    status: int
    code: str


_ADD = """
insert into {table} (id, created_at, tenant_id, starts_at, endpoint, status, code, requests)
select counted.* from unnest(%s::uuid[], %s::timestamptz[], %s::uuid[], %s::timestamptz[],
  %s::text[], %s::smallint[], %s::text[], %s::bigint[])
  as counted (id, created_at, tenant_id, starts_at, endpoint, status, code, requests)
join {tenants} tenant on tenant.id = counted.tenant_id
on conflict (tenant_id, starts_at, endpoint, status, code)
do update set requests = {table}.requests + excluded.requests
"""


def refusals_add(counts: Mapping[RefusalKey, int]) -> None:
    """Add to the stored counts; those of deleted tenants are dropped.

    Adds all or nothing. Raises django.db.Error.
    """
    if not counts:
        return
    keys = sorted(counts, key=lambda key: tuple(map(str, key)))
    now = dt.datetime.now(dt.UTC)
    columns: list[list[object]] = [[new_id() for _ in keys], [now] * len(keys)]
    columns += [[key[index] for key in keys] for index in range(len(RefusalKey._fields))]
    columns.append([counts[key] for key in keys])
    sql = _ADD.format(table=RefusalHour._meta.db_table, tenants=Tenant._meta.db_table)
    with all_tenants(reason="refusals of many tenants"), connection.cursor() as cursor:
        cursor.execute(sql, columns)
