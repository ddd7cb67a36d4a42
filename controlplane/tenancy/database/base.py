"""The database backend, which sends the tenant in scope to PostgreSQL with every statement.

A statement that reads or writes rows is sent together with `set_config(…, true)`, in one message.
PostgreSQL runs such a message as one transaction. Outside `atomic()` the setting ends with the
statement, inside with the transaction, so a connection never returns to its pool with a tenant's
scope. The backend stores no state about it: nothing can be stale after a rollback to a savepoint,
and it costs no round trip.

It also tells `controlplane.tenancy.epochs` of each write that may take rights away, after its
commit, and bounds what patient code waits (`controlplane.infra.circuit`).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import psycopg
import psycopg_pool
from django.db import InterfaceError, OperationalError
from django.db.backends.postgresql import base
from django.utils.asyncio import async_unsafe
from psycopg.sql import Composable

from controlplane.infra.circuit import circuit, patience_left
from controlplane.infra.metrics import DATABASE_ERRORS
from controlplane.tenancy import epochs
from controlplane.tenancy.database.patient import AWAY, PatientConnection
from controlplane.tenancy.scope import database_scope, statement_timeout_ms

#: Other statements (DDL, SAVEPOINT, ROLLBACK, …) touch no rows and are sent alone; some must be.
_TOUCHES_ROWS = re.compile(
    r"[\s(]*(?:select|insert|update|delete|merge|with|values|table|explain)\b", re.IGNORECASE
)


#: Longest wait for a connection of the pool before a look at the circuit.
_LONG_S = 0.5


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's PostgreSQL backend, which sends the current scope with every statement."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute_wrappers += [_counting_outages, _tell_of_writes, _with_scope]

    @async_unsafe
    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        try:
            return self._new_connection(conn_params)
        except psycopg.OperationalError:
            DATABASE_ERRORS.inc()
            raise

    def _new_connection(self, conn_params: dict[str, Any]) -> Any:
        left = patience_left()
        if left is not None and circuit.is_open:
            raise psycopg.OperationalError(AWAY)
        self.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # PostgreSQL's default
        if self.pool is None:
            return PatientConnection.connect(**conn_params)
        self.pool.open()
        return self.pool.getconn() if left is None else self._patient_getconn(left)

    def _patient_getconn(self, seconds: float) -> Any:
        """Wait for a connection of the pool, but not for a server that is known to be away."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            try:
                return self.pool.getconn(min(left, _LONG_S))
            except psycopg_pool.PoolTimeout:
                circuit.doubt()  # all connections are in use, or none can be made
                if circuit.is_open or left <= _LONG_S:
                    raise


def _counting_outages(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    try:
        return execute(sql, params, many, context)
    except (OperationalError, InterfaceError):
        DATABASE_ERRORS.inc()
        raise


def _tell_of_writes(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    result = execute(sql, params, many, context)
    if isinstance(sql, str) and (moved := epochs.moved_by(sql)) is not None:
        # Without a transaction this runs now; a rollback drops it.
        context["connection"].on_commit(functools.partial(epochs.move, moved), robust=True)
    return result


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
    if limit_ms := statement_timeout_ms.get():
        # PostgreSQL starts a new timeout for each statement of a message.
        setting += f", set_config('statement_timeout', '{limit_ms}', true)"
    if many:  # one message per row; in autocommit they get no scope and match no rows
        if not connection.autocommit:
            execute(setting, None, False, context)
        return execute(sql, params, many, context)
    result = execute(f"{setting}; {sql}", params, many, context)
    cursor.nextset()  # past the setting's own result
    return result
