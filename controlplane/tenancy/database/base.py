"""The database backend: it tells PostgreSQL with every statement which tenant's rows it may touch.

A statement that reads or writes rows is sent together with `set_config(…, true)`, in one message.
PostgreSQL runs such a message as one transaction. Outside `atomic()` the setting ends with the
statement, inside with the transaction, so a connection never returns to its pool with a tenant's
scope. The backend stores no state about it: nothing can be stale after a rollback to a savepoint,
and it costs no round trip.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from django.db import InterfaceError, OperationalError
from django.db.backends.postgresql import base
from psycopg import OperationalError as PsycopgOutage
from psycopg.sql import Composable

from controlplane.infra.metrics import DATABASE_ERRORS
from controlplane.tenancy.scope import database_scope

#: Other statements (DDL, SAVEPOINT, ROLLBACK, …) touch no rows and are sent alone; some must be.
_TOUCHES_ROWS = re.compile(
    r"[\s(]*(?:select|insert|update|delete|merge|with|values|table|explain)\b", re.IGNORECASE
)


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's PostgreSQL backend, which sends the current scope with every statement."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute_wrappers += [_counting_outages, _with_scope]

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        try:
            return super().get_new_connection(conn_params)
        except PsycopgOutage:
            DATABASE_ERRORS.inc()
            raise


def _counting_outages(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    try:
        return execute(sql, params, many, context)
    except (OperationalError, InterfaceError):
        DATABASE_ERRORS.inc()
        raise


def _with_scope(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    connection, cursor = context["connection"], context["cursor"].cursor
    scope = database_scope()
    if isinstance(sql, Composable):
        sql = sql.as_string(cursor)
    # In a transaction an earlier statement's scope must be reset; outside one there is none.
    if not _TOUCHES_ROWS.match(sql) or (scope.is_empty and connection.autocommit):
        return execute(sql, params, many, context)
    setting = (
        f"SELECT set_config('role', '{scope.role}', true), "
        f"set_config('lorikeet.tenant', '{scope.tenant}', true)"
    )
    if many:  # one message per row; in autocommit they get no scope and match no rows
        if not connection.autocommit:
            execute(setting, None, False, context)
        return execute(sql, params, many, context)
    result = execute(f"{setting}; {sql}", params, many, context)
    cursor.nextset()  # past the setting's own result
    return result
