"""The current tenant scope, without an import of Django's models: for the database and the logs.

Code that works with rows enters and reads the scope through `controlplane.tenancy.scoping`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

#: A tenant's id, `ALL` inside `all_tenants`, or None outside any scope.
current: ContextVar[uuid.UUID | str | None] = ContextVar("tenant_scope", default=None)
ALL = "*"
#: Milliseconds after which PostgreSQL cancels a statement; 0: its own setting applies.
statement_timeout_ms: ContextVar[int] = ContextVar("statement_timeout_ms", default=0)
#: The database role inside `all_tenants`; the application's role sees at most one tenant.
OPERATOR_ROLE = "lorikeet_operator"


@contextlib.contextmanager
def tenant_scope(tenant_id: uuid.UUID) -> Iterator[None]:
    """Act for one tenant: queries see only its rows, and new rows belong to it."""
    token = current.set(tenant_id)
    try:
        yield
    finally:
        current.reset(token)


@dataclasses.dataclass(frozen=True, slots=True)
class DatabaseScope:
    """The role that a statement runs as, and its tenant's id or ""."""

    role: str
    tenant: str

    @property
    def is_empty(self) -> bool:
        return self == _NO_SCOPE


_NO_SCOPE = DatabaseScope("none", "")
_OPERATOR_SCOPE = DatabaseScope(OPERATOR_ROLE, "")


def database_scope() -> DatabaseScope:
    """Return the current scope as role and tenant; outside any scope no tenant row is visible."""
    scope = current.get()
    if isinstance(scope, uuid.UUID):
        return DatabaseScope("none", str(scope))
    return _NO_SCOPE if scope is None else _OPERATOR_SCOPE


def add_tenant(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the scope's `tenant_id` to a log line, "*" across tenants. A processor of structlog."""
    scope = current.get()
    if scope is not None:
        event.setdefault("tenant_id", str(scope))
    return event
