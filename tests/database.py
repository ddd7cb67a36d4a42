"""The tests' databases: made by the owner of the tables, used by the application's role."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql


def own_database(env: Mapping[str, str], name: str) -> dict[str, str]:
    """Make an empty database on the stack's server; the variables that lead to it."""
    with psycopg.connect(env["DATABASE_OWNER_URL"], autocommit=True) as connection:
        identifier = sql.Identifier(name)
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(identifier))
        connection.execute(sql.SQL("create database {}").format(identifier))
    return {
        variable: urlunsplit(urlsplit(env[variable])._replace(path=f"/{name}"))
        for variable in ("DATABASE_URL", "DATABASE_OWNER_URL")
    }


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
