import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import POLICIES, TenantTables

#: A table by months, with one partition for all earlier times and one for times without a month.
RECORDS = """
create table usage_usagerecord (
  id uuid not null,
  created_at timestamptz not null,
  request_id varchar(64) not null,
  api_key_id uuid,
  model varchar(200) not null,
  base_model varchar(63) not null,
  adapter_version_id uuid,
  prompt_tokens integer not null,
  cached_tokens integer not null,
  completion_tokens integer not null,
  finish_reason varchar(32) not null,
  occurred_at timestamptz not null,
  tenant_id uuid not null
) partition by range (occurred_at);
create unique index usage_record_id on usage_usagerecord (id, occurred_at);
create unique index usage_record_once on usage_usagerecord (request_id, occurred_at);
create index usage_record_of_tenant on usage_usagerecord (tenant_id, occurred_at);
alter table usage_usagerecord add constraint usage_record_tenant foreign key (tenant_id)
  references tenants_tenant (id) deferrable initially deferred;
create table usage_usagerecord_other partition of usage_usagerecord default;
do $body$
begin
  execute format(
    'create table usage_usagerecord_before partition of usage_usagerecord'
    ' for values from (minvalue) to (%L)',
    date_trunc('month', now() at time zone 'UTC' + interval '7 days') at time zone 'UTC'
      + interval '1 month');
end
$body$;
"""

#: The partitions with their bounds; null: no bound, or the one for all other times.
VIEW = """
create view usage_partitions as
select c.relname::text as partition,
  substring(pg_get_expr(c.relpartbound, c.oid) from 'FROM \\(''([^'']+)''\\)')::timestamptz as start,
  substring(pg_get_expr(c.relpartbound, c.oid) from 'TO \\(''([^'']+)''\\)')::timestamptz as stop
from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'usage_usagerecord'::regclass
"""

#: What the application calls to make partitions and to drop old ones.
FUNCTIONS = f"""
create function usage_partition_protect(name text) returns void
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
create function usage_partitions_make(until timestamptz) returns int
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

create function usage_partitions_drop(before timestamptz) returns text[]
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

#: The application's rights are granted at the end of all migrations, also on these.
PARTITIONS = """
select usage_partition_protect('usage_usagerecord_before');
select usage_partition_protect('usage_usagerecord_other');
select usage_partitions_make(now() + interval '3 months');
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunSQL(RECORDS, "drop table usage_usagerecord")],
            state_operations=[
                migrations.CreateModel(
                    name="UsageRecord",
                    fields=[
                        (
                            "id",
                            models.UUIDField(
                                default=controlplane.tenancy.scoping.new_id,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        (
                            "tenant",
                            models.ForeignKey(
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="+",
                                to="tenants.tenant",
                            ),
                        ),
                        ("created_at", models.DateTimeField(auto_now_add=True)),
                        ("request_id", models.CharField(max_length=64)),
                        ("api_key_id", models.UUIDField(null=True)),
                        ("model", models.CharField(max_length=200)),
                        ("base_model", models.CharField(max_length=63)),
                        ("adapter_version_id", models.UUIDField(null=True)),
                        ("prompt_tokens", models.PositiveIntegerField()),
                        ("cached_tokens", models.PositiveIntegerField(default=0)),
                        ("completion_tokens", models.PositiveIntegerField()),
                        ("finish_reason", models.CharField(max_length=32)),
                        ("occurred_at", models.DateTimeField()),
                    ],
                    options={
                        "indexes": [
                            models.Index(
                                fields=["tenant", "occurred_at"],
                                name="usage_usage_tenant__04a59b_idx",
                            )
                        ],
                        "constraints": [
                            models.UniqueConstraint(
                                fields=("request_id", "occurred_at"), name="usage_record_once"
                            )
                        ],
                    },
                )
            ],
        ),
        migrations.CreateModel(
            name="UsageHour",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("starts_at", models.DateTimeField()),
                ("model", models.CharField(max_length=200)),
                ("api_key_id", models.UUIDField(null=True)),
                ("requests", models.PositiveBigIntegerField()),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("completion_tokens", models.PositiveBigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "starts_at", "model", "api_key_id"),
                        name="usagehour_once",
                        nulls_distinct=False,
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="UsageDay",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("starts_at", models.DateTimeField()),
                ("model", models.CharField(max_length=200)),
                ("api_key_id", models.UUIDField(null=True)),
                ("requests", models.PositiveBigIntegerField()),
                ("prompt_tokens", models.PositiveBigIntegerField()),
                ("cached_tokens", models.PositiveBigIntegerField()),
                ("completion_tokens", models.PositiveBigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "starts_at", "model", "api_key_id"),
                        name="usageday_once",
                        nulls_distinct=False,
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="TrainingUsage",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("run_id", models.UUIDField()),
                ("attempt", models.PositiveIntegerField()),
                ("adapter", models.CharField(blank=True, max_length=63)),
                ("base_model", models.CharField(max_length=63)),
                ("trained_tokens", models.BigIntegerField()),
                ("device", models.CharField(max_length=64)),
                ("is_gpu", models.BooleanField()),
                ("device_ms", models.BigIntegerField()),
                ("occurred_at", models.DateTimeField()),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "occurred_at"], name="usage_train_tenant__deee43_idx"
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "run_id", "attempt"), name="training_usage_once"
                    )
                ],
            },
        ),
        TenantTables("UsageRecord", "UsageHour", "UsageDay", "TrainingUsage"),
        migrations.RunSQL(VIEW, "drop view usage_partitions"),
        migrations.RunSQL(
            FUNCTIONS,
            "drop function usage_partitions_drop, usage_partitions_make, usage_partition_protect",
        ),
        migrations.RunSQL(PARTITIONS, migrations.RunSQL.noop),
    ]
