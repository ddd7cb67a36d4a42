"""The database backend: PostgreSQL that is told with every statement whose rows it may touch.

A statement that reads or writes rows is sent together with `set_config(…, true)`, in one message.
PostgreSQL runs such a message as one transaction, so outside `atomic()` the setting is gone when
the statement is done, and inside it ends with the transaction: a connection goes back to its pool
with nothing of a tenant on it, whatever happened. Nothing about it is remembered here, so nothing
can be out of date after a rollback to a savepoint, and it costs no round trip.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from django.db.backends.postgresql import base
from psycopg.sql import Composable

from controlplane.tenancy.scope import database_scope

#: Other statements (DDL, SAVEPOINT, ROLLBACK, …) go alone: they touch no rows, and some must.
_TOUCHES_ROWS = re.compile(
    r"[\s(]*(?:select|insert|update|delete|merge|with|values|table|explain)\b", re.IGNORECASE
)


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's PostgreSQL backend whose statements carry the scope they run in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute_wrappers.append(_with_scope)


def _with_scope(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]
) -> Any:
    connection, cursor = context["connection"], context["cursor"].cursor
    scope = database_scope()
    if isinstance(sql, Composable):
        sql = sql.as_string(cursor)
    # In a transaction an earlier statement's scope has to be undone; outside one there is none.
    if not _TOUCHES_ROWS.match(sql) or (scope.is_empty and connection.autocommit):
        return execute(sql, params, many, context)
    setting = (
        f"SELECT set_config('role', '{scope.role}', true), "
        f"set_config('lorikeet.tenant', '{scope.tenant}', true)"
    )
    if many:  # one message for each row; in autocommit they stay without, and find no rows
        if not connection.autocommit:
            execute(setting, None, False, context)
        return execute(sql, params, many, context)
    result = execute(f"{setting}; {sql}", params, many, context)
    cursor.nextset()  # past the setting's own result
    return result
