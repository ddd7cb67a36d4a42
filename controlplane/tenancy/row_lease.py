"""A lease on a row: the process that works on it, its end, and its fencing token.

The token is a counter in the row that each holder raises by one. Every later write of a holder
names its token: writes of a process that was given up for lost are refused.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any, ClassVar, Generic, TypeVar

from django.db.models import F, QuerySet
from django.utils import timezone

from controlplane.tenancy.scoping import TenantModel

_Row = TypeVar("_Row", bound=TenantModel)


class LeaseLost(Exception):
    """Raised when another process has the row, or the work on it has ended."""


class RowLease(Generic[_Row]):
    """A lease held through a row in memory. Use it in the scope of the row's tenant.

    The row has a `status`, `lease_until`, and its counter in `fence_field`.
    """

    fence_field: ClassVar[str] = "fence"

    def __init__(self, row: _Row) -> None:
        self.tenant_id: uuid.UUID = row.tenant_id
        self.row_id: uuid.UUID = row.pk
        self.fence: int = getattr(row, self.fence_field)
        self._kind = type(row)

    @classmethod
    def take(cls, rows: QuerySet[_Row], duration: dt.timedelta, **changes: Any) -> bool:
        """Give the one row of `rows` to a new holder; return False when it is gone."""
        changes[cls.fence_field] = F(cls.fence_field) + 1
        return cls.extend(rows, duration, **changes)

    @staticmethod
    def extend(rows: QuerySet[_Row], duration: dt.timedelta, **changes: Any) -> bool:
        """Hold the one row of `rows` until `duration` from now; return False when it is gone."""
        return rows.update(lease_until=timezone.now() + duration, **changes) == 1

    def rows(self, *statuses: str) -> QuerySet[_Row]:
        """Return the row, if it still has this lease and one of these states."""
        held = {"pk": self.row_id, self.fence_field: self.fence}
        return self._kind.objects.filter(**held, status__in=statuses)
