"""The scope that code runs in, for those that Django's models need: the database and the logs.

Everybody else enters and reads it through `controlplane.tenancy.scoping`.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from contextvars import ContextVar

#: A tenant's id, `ALL` inside `all_tenants`, or None outside any scope.
current: ContextVar[uuid.UUID | str | None] = ContextVar("tenant_scope", default=None)
ALL = "*"
#: The database role that `all_tenants` takes on; the application's role sees one tenant at most.
OPERATOR_ROLE = "lorikeet_operator"


@dataclasses.dataclass(frozen=True, slots=True)
class DatabaseScope:
    """What a statement says to the database: the role it runs as, and its tenant or ""."""

    role: str
    tenant: str

    @property
    def is_empty(self) -> bool:
        return self == _NO_SCOPE


_NO_SCOPE = DatabaseScope("none", "")
_OPERATOR_SCOPE = DatabaseScope(OPERATOR_ROLE, "")


def database_scope() -> DatabaseScope:
    """The current scope in the database's terms; outside any scope it sees no tenant's row."""
    scope = current.get()
    if isinstance(scope, uuid.UUID):
        return DatabaseScope("none", str(scope))
    return _NO_SCOPE if scope is None else _OPERATOR_SCOPE


class TenantFilter(logging.Filter):
    """Gives every log record `tenant`: the scope's id, `*` across tenants, `-` outside any."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.tenant = current.get() or "-"
        return True
