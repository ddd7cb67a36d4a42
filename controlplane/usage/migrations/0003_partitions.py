"""Partition the usage records by month, so that old ones are dropped and not deleted one by one.

The existing table becomes the first partition as it is. What takes long, two indexes and the scan
for a CHECK, happens before that, beside reads and writes; the exchange itself is a moment. It may be
killed at any point and run again.
"""

from __future__ import annotations

import time
from typing import Any

from django.db import OperationalError, migrations, models

from controlplane.tenancy.database.operations import POLICIES

FUNCTIONS = f"""
create or replace function usage_partition_protect(name text) returns void
language plpgsql set search_path = pg_catalog, public, pg_temp as $body$
begin
  execute format('alter table public.%I enable row level security', name);
  execute format('alter table public.%I force row level security', name);
{
    "".join(
        f'''  execute format('create policy {policy} on public.%I {purpose} {condition.replace("'", "''")}', name);
'''
        for policy, (purpose, condition) in POLICIES.items()
    )
}end
$body$;

-- The owner's rights, because the application owns no table: it may only name a moment.
create or replace function usage_partitions_make(until timestamptz) returns int
language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $body$
declare
  start timestamptz;
  num_made int := 0;
  name text;
  held record;
begin
  perform pg_advisory_xact_lock(hashtext('usage_partitions'));
  select max(stop) into start from usage_partitions where stop is not null;
  while start <= until and num_made < 120 loop
    name := 'usage_usagerecord_' || to_char(start at time zone 'UTC', 'YYYY_MM');
    if not exists (
      select from usage_usagerecord_other
      where occurred_at >= start and occurred_at < start + interval '1 month'
    ) then
      execute format(
        'create table public.%I partition of public.usage_usagerecord for values from (%L) to (%L)',
        name, start, (start at time zone 'UTC' + interval '1 month') at time zone 'UTC');
      perform usage_partition_protect(name);
      -- Who reads a partition by its name, as a backup does, needs rights of its own.
      for held in select grantee, privilege_type from information_schema.role_table_grants
        where table_schema = 'public' and table_name = 'usage_usagerecord'
        and grantee not in (current_user, 'PUBLIC')
      loop
        execute format('grant %s on public.%I to %I', held.privilege_type, name, held.grantee);
      end loop;
      num_made := num_made + 1;
    end if;
    start := (start at time zone 'UTC' + interval '1 month') at time zone 'UTC';
  end loop;
  return num_made;
end
$body$;

create or replace function usage_partitions_drop(before timestamptz) returns text[]
language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $body$
declare
  dropped text[] := array[]::text[];
  name text;
begin
  if before > now() - interval '30 days' then
    raise exception 'usage of the last 30 days cannot be dropped';
  end if;
  perform pg_advisory_xact_lock(hashtext('usage_partitions'));
  for name in select partition from usage_partitions where stop <= before order by stop loop
    execute format('drop table public.%I', name);
    dropped := dropped || name;
  end loop;
  return dropped;
end
$body$;
"""

#: The partitions with their bounds; null: no bound, or the one for all other times.
VIEW = """
create or replace view usage_partitions as
select c.relname::text as partition,
  substring(pg_get_expr(c.relpartbound, c.oid) from 'FROM \\(''([^'']+)''\\)')::timestamptz as start,
  substring(pg_get_expr(c.relpartbound, c.oid) from 'TO \\(''([^'']+)''\\)')::timestamptz as stop
from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'usage_usagerecord'::regclass
"""

#: Beside reads and writes.
INDEXES = (
    "create unique index concurrently if not exists usage_before_id"
    " on usage_usagerecord (id, occurred_at)",
    "create unique index concurrently if not exists usage_before_request"
    " on usage_usagerecord (request_id, occurred_at)",
)
#: Each takes a lock for a moment; the last reads the table beside reads and writes.
BOUND = (
    "alter table usage_usagerecord drop constraint if exists usage_before",
    "alter table usage_usagerecord add constraint usage_before"
    " check (occurred_at < '{boundary}') not valid",
    "alter table usage_usagerecord validate constraint usage_before",
)

#: Who uses the table waits behind a statement that waits for its lock, as for the end of a backup:
#: so that gives up, and tries again.
LOCK_TIMEOUT_S, MAX_TRIES, PAUSE_S = 3, 20, 3.0

EXCHANGE = """
alter table usage_usagerecord rename to usage_usagerecord_before;
create table usage_usagerecord (like usage_usagerecord_before including defaults)
  partition by range (occurred_at);
create unique index usage_record_id on usage_usagerecord (id, occurred_at);
create unique index usage_record_once on usage_usagerecord (request_id, occurred_at);
create index usage_record_of_tenant on usage_usagerecord (tenant_id, occurred_at);
alter table usage_usagerecord add constraint usage_record_tenant foreign key (tenant_id)
  references tenants_tenant (id) deferrable initially deferred;
alter table usage_usagerecord attach partition usage_usagerecord_before
  for values from (minvalue) to ('{boundary}');
create table usage_usagerecord_other partition of usage_usagerecord default;
do $body$
declare
  held record;
begin
  -- Now and not at the end of all migrations: who writes must not be refused in between.
  for held in select grantee, privilege_type from information_schema.role_table_grants
    where table_name = 'usage_usagerecord_before' and grantee not in (current_user, 'PUBLIC')
  loop
    execute format('grant %s on public.usage_usagerecord, public.usage_usagerecord_other to %I',
      held.privilege_type, held.grantee);
  end loop;
end
$body$;
{view};
{functions}
select usage_partition_protect('usage_usagerecord');
select usage_partition_protect('usage_usagerecord_other');
select usage_partitions_make(now() + interval '3 months');
"""


def partition(apps: Any, schema_editor: Any) -> None:
    """Partition the table, unless it is already."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(
            "select relkind::text, date_trunc('month', now() at time zone 'UTC' + interval '7 days')"
            " at time zone 'UTC' + interval '1 month'"
            " from pg_class where oid = 'usage_usagerecord'::regclass"
        )
        kind, boundary_at = cursor.fetchone()
        boundary = boundary_at.isoformat()
        if kind == "p":
            return
        # An index that a killed run left is not valid.
        cursor.execute(
            "select indexrelid::regclass::text from pg_index where not indisvalid"
            " and indrelid = 'usage_usagerecord'::regclass"
        )
        for (name,) in cursor.fetchall():
            cursor.execute(f"drop index concurrently {name}")
        for statement in INDEXES:
            cursor.execute(statement)
        for statement in (*BOUND, EXCHANGE):
            _try(cursor, statement.format(boundary=boundary, view=VIEW, functions=FUNCTIONS))


def _try(cursor: Any, statements: str) -> None:
    """Run them in a transaction. Raises OperationalError if others keep its locks all the time."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            cursor.execute(
                f"begin; set local lock_timeout = '{LOCK_TIMEOUT_S}s'; {statements}; commit"
            )
            return
        except OperationalError:
            cursor.execute("rollback")
            if not tries_left:
                raise
            time.sleep(PAUSE_S)


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("usage", "0002_totals"),
        # The policies that the partitions get.
        ("database", "0001_walls"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            # Undone, the table stays as it is: earlier code can use it.
            database_operations=[
                migrations.RunPython(partition, migrations.RunPython.noop, elidable=False)
            ],
            state_operations=[
                migrations.AlterField(
                    model_name="usagerecord",
                    name="request_id",
                    field=models.CharField(max_length=64),
                ),
                migrations.AddConstraint(
                    model_name="usagerecord",
                    constraint=models.UniqueConstraint(
                        fields=("request_id", "occurred_at"), name="usage_record_once"
                    ),
                ),
            ],
        ),
    ]
