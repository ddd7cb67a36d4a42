"""The tests' databases: made by the owner of the tables, used by the application's role."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, LiteralString
from unittest.mock import patch
from urllib.parse import urlsplit, urlunsplit

import psycopg
from django.core.management.commands import flush
from psycopg import sql

from demo.servers import SUPERUSER, postgres_program

ROOT = Path(__file__).parent.parent
#: A database that is migrated once; others are copies of it.
MIGRATED = "lorikeet_migrated"
#: What `migrate` fills and nothing of ours writes.
STATIC_TABLES = ("django_content_type", "auth_permission")


def migrated_database(env: Mapping[str, str], name: str) -> dict[str, str]:
    """Make a database with our tables on the stack's server; the variables that lead to it."""
    ensure_migrated(env)
    return own_database(env, name, template=MIGRATED)


def ensure_migrated(env: Mapping[str, str]) -> None:
    """Make the database that others are copies of, if there is none on this server.

    To migrate takes 13 s of a processor: a dump is kept for the lanes, and for further runs with
    the same code.
    """
    if _exists(env, MIGRATED):
        return
    made = own_database(env, f"{MIGRATED}_new")
    dumps = ROOT / ".test" / "dumps"
    dumps.mkdir(parents=True, exist_ok=True)
    dump = dumps / f"{_fingerprint()}.sql"
    with (dumps / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_there = dump.exists()
        if not is_there:
            _migrate({**env, **made})
            _run_postgres("pg_dump", made, f"--file={dump}.new")
            for old in dumps.glob("*.sql"):
                old.unlink()
            dump.with_suffix(".sql.new").rename(dump)
    if is_there:
        _run_postgres("psql", made, "--quiet", "--set=ON_ERROR_STOP=1", f"--file={dump}")
    _execute(env, "alter database {} rename to {}", f"{MIGRATED}_new", MIGRATED)


def _fingerprint() -> str:
    """A hash of what a migrated database depends on: migrations run code of ours and Django's."""
    known = hashlib.sha256(sys.version.encode())
    paths = [*(ROOT / "controlplane").rglob("*.py"), *(ROOT / "contract").rglob("*.py")]
    paths += [*(ROOT / "controlplane").rglob("*.sql"), *(ROOT / "requirements").glob("*.txt")]
    for path in sorted([*paths, ROOT / "demo" / "servers.py"]):
        known.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return known.hexdigest()[:16]


def _migrate(env: Mapping[str, str]) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity=0"],
        cwd=ROOT,
        env={**os.environ, **env},
        check=True,
    )


def _run_postgres(program: str, env: Mapping[str, str], *argv: str) -> None:
    """Run one of PostgreSQL's programs on a database, as who may do all."""
    owner = urlsplit(env["DATABASE_OWNER_URL"])
    netloc = owner.netloc.replace(f"{owner.username}:", f"{SUPERUSER}:", 1)
    place = urlunsplit(owner._replace(netloc=netloc))
    subprocess.run(
        [postgres_program(program), f"--dbname={place}", *argv],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def own_database(
    env: Mapping[str, str], name: str, *, template: str = "template1"
) -> dict[str, str]:
    """Make a database on the stack's server, empty or a copy; the variables that lead to it."""
    _execute(env, "drop database if exists {} with (force)", name)
    _execute(env, "create database {} template {}", name, template)
    return {
        variable: urlunsplit(urlsplit(env[variable])._replace(path=f"/{name}"))
        for variable in ("DATABASE_URL", "DATABASE_OWNER_URL")
    }


def _exists(env: Mapping[str, str], name: str) -> bool:
    with psycopg.connect(env["DATABASE_OWNER_URL"]) as connection:
        found = connection.execute("select 1 from pg_database where datname = %s", (name,))
        return found.fetchone() is not None


def _execute(env: Mapping[str, str], statement: LiteralString, *names: str) -> None:
    with psycopg.connect(env["DATABASE_OWNER_URL"], autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


def operator_url(url: str) -> str:
    """The same database for a role that sees every tenant's rows."""
    return f"{url}?options=-crole%3Dlorikeet_operator"


_owner: contextlib.ExitStack | None = None


def become_owner() -> None:
    """Let Django's own connection be the owner's, until `as_application`."""
    from django.db import connection

    from controlplane.tenancy.database.ownership import as_owner

    global _owner
    _owner = contextlib.ExitStack()
    _owner.enter_context(as_owner(connection))


@contextlib.contextmanager
def as_application() -> Iterator[None]:
    """Tests inside use the application's role; afterwards the owner drops the database."""
    from django.db import connection

    assert _owner is not None
    _owner.close()
    connection.ops.execute_sql_flush = _flush  # type: ignore[method-assign]
    # Django's own rows about our models stay: to make them again takes longer than all the rest.
    name_tables = connection.introspection.django_table_names
    connection.introspection.django_table_names = lambda **options: [  # type: ignore[method-assign]
        name for name in name_tables(**options) if name not in STATIC_TABLES
    ]
    with patch.object(flush, "emit_post_migrate_signal"):
        yield
    become_owner()


def _flush(sql_list: Any) -> None:
    """Empty the tables after a test that committed: only their owner can."""
    from django.db import connection

    from controlplane.tenancy.database.ownership import as_owner

    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute("alter table audit_auditevent disable trigger user")
        for statement in sql_list:
            cursor.execute(statement)
        cursor.execute("alter table audit_auditevent enable trigger user")
