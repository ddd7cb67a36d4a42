"""A database made by an earlier release takes today's migrations, and keeps what it had.

`schema_edf1380.json` is of a database that commit edf1380 made on PostgreSQL, before packages of
the control plane moved: the migrations that were applied, by the app's label; each model's content
type; the tables, their columns and types; how many row-level policies each table had.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command

from demo.commands import Commands
from demo.stack import EmbeddedStack
from tests.conftest import ROOT
from tests.database import own_database

BEFORE: dict[str, Any] = json.loads((Path(__file__).parent / "schema_edf1380.json").read_text())
_COLUMNS = """
    select table_name, column_name, data_type, is_nullable = 'YES'
    from information_schema.columns where table_schema = 'public'
"""
_POLICIES = """
    select relname, count(*) from pg_policy join pg_class on pg_class.oid = polrelid
    group by relname
"""
_CONTENT_TYPES = "select app_label, model from django_content_type"
#: Makes the database of that release: its migrations and no more, and its models' content types.
_AS_BEFORE = f"""
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from controlplane.tenancy.database.ownership import as_owner
last = [(label, names[-1]) for label, names in {BEFORE["migrations"]!r}.items()]
last.append(("contenttypes", "0002_remove_content_type_name"))
with as_owner(connection):
    MigrationExecutor(connection).migrate(last)
    for label, models in {BEFORE["content_types"]!r}.items():
        for model in models:
            ContentType.objects.get_or_create(app_label=label, model=model)
"""


#: An adapter whose three ready versions went live one after the other. Its owner is held by the
#: tables' policies while they are forced.
_ADAPTER = """
alter table adapters_adapter no force row level security;
alter table adapters_adapterversion no force row level security;
alter table tenants_tenant no force row level security;
insert into tenants_tenant (id, created_at, name, slug, status, requires_second_factor,
    allowed_origins) values (gen_random_uuid(), now(), 'Old', 'old', 'active', false, '[]');
insert into adapters_basemodel (id, created_at, name, revision, config, context_length, max_rank,
    is_active) values (gen_random_uuid(), now(), 'tiny', '0', '{}', 128, 64, true);
insert into adapters_adapter (id, created_at, name, description, base_model_id, tenant_id)
    select gen_random_uuid(), now(), 'invoices', '', b.id, t.id
    from adapters_basemodel b, tenants_tenant t where t.slug = 'old';
insert into adapters_adapterversion (id, created_at, number, status, source, digest, num_bytes,
    config_num_bytes, max_rank, reasons, report, ready_at, status_changed_at, adapter_id, tenant_id)
    select gen_random_uuid(), now(), n, case n when 2 then 'rejected' else 'ready' end, 'upload',
        '', 1, 1, 1, '[]', '{}', now() + n * interval '1 s', now(), a.id, a.tenant_id
    from adapters_adapter a, generate_series(1, 4) n;
update adapters_adapter set live_version_id =
    (select id from adapters_adapterversion where number = 4);
set constraints all immediate;
alter table adapters_adapter force row level security;
alter table adapters_adapterversion force row level security;
alter table tenants_tenant force row level security;
"""
_PROMOTIONS = """
    select p.previous_number, p.number, v.number, p.cause
    from adapters_promotion p join adapters_adapterversion v on v.id = p.version_id
    order by p.created_at
"""


@dataclasses.dataclass(frozen=True)
class Upgraded:
    """Such a database after today's `migrate`, and the process that did it."""

    env: dict[str, str]
    commands: Commands


@pytest.fixture(scope="module")
def installation(stack: EmbeddedStack) -> Iterator[Upgraded]:
    env = {**os.environ, **own_database(stack.env, "upgrade")}
    _manage(env, "shell", "--no-imports", "-c", _AS_BEFORE)
    assert _columns(env).items() >= _columns_before().items()
    with psycopg.connect(env["DATABASE_OWNER_URL"]) as connection:
        connection.execute(_ADAPTER.encode())
    with Commands(env) as commands:
        commands.run("migrate", "--no-input")
        yield Upgraded(env, commands)


@pytest.fixture(scope="module")
def upgraded(installation: Upgraded) -> dict[str, str]:
    """The environment of such a database, after today's `migrate`."""
    return installation.env


def test_every_applied_migration_is_known_under_its_label(installation: Upgraded) -> None:
    listed = installation.commands.run("showmigrations", "--plan")
    applied = {line.split()[-1] for line in listed.splitlines() if line.startswith("[X]")}
    names = {f"{label}.{name}" for label, of_app in BEFORE["migrations"].items() for name in of_app}
    assert names - applied == set()


@pytest.mark.django_db
def test_no_migration_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("makemigrations", "--check", "--dry-run")
    assert "No changes detected" in capsys.readouterr().out


#: Columns that became nullable: earlier rows fit them.
MAY_BE_NULL_NOW = (
    ("training_trainingrun", "dataset_id"),
    ("training_schedulerun", "training_run_id"),  # of a slot without a run
)


def test_tables_columns_and_policies_stay(upgraded: dict[str, str]) -> None:
    before = _columns_before()
    after = _columns(upgraded)
    for column in MAY_BE_NULL_NOW:
        before[column] += " null"
    assert {column: after.get(column) for column in before} == before
    policies = dict(_rows(upgraded, _POLICIES))
    assert {table: policies.get(table) for table in BEFORE["policies"]} == BEFORE["policies"]


def test_adapters_go_on_as_before_with_the_history_that_they_had(upgraded: dict[str, str]) -> None:
    unforced = "alter table {} no force row level security"
    tables = ("adapters_adapter", "adapters_adapterversion", "adapters_promotion")
    with psycopg.connect(upgraded["DATABASE_OWNER_URL"]) as connection:
        for table in tables:
            connection.execute(unforced.format(table).encode())
        policies = connection.execute("select promotion_policy from adapters_adapter").fetchall()
        rows = connection.execute(_PROMOTIONS.encode()).fetchall()
        connection.rollback()
    assert policies == [("immediate",)]
    assert rows == [(None, 1, 1, "first"), (1, 3, 3, "policy"), (3, 4, 4, "policy")]


def test_models_keep_their_apps(upgraded: dict[str, str]) -> None:
    before = {
        (label, model) for label, models in BEFORE["content_types"].items() for model in models
    }
    after = set(_rows(upgraded, _CONTENT_TYPES))
    assert before - after == set()
    models = [model for _, model in before]
    assert {row for row in after if row[1] in models} == before  # none has a second home


def _columns_before() -> dict[tuple[str, str], str]:
    return {
        (table, name): kind
        for table, columns in BEFORE["columns"].items()
        for name, _, kind in (column.partition(" ") for column in columns)
    }


def _columns(env: dict[str, str]) -> dict[tuple[str, str], str]:
    return {
        (table, name): kind + (" null" if can_be_null else "")
        for table, name, kind, can_be_null in _rows(env, _COLUMNS)
    }


def _rows(env: dict[str, str], query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(env["DATABASE_OWNER_URL"]) as connection:
        return connection.execute(query.encode()).fetchall()


def _manage(env: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
