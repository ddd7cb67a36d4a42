"""The scope: the tenant that code acts for. Every query of tenant rows uses it.

A query of a tenant model outside a scope raises `TenantScopeError`: code that forgets the scope
fails closed. Code that must cross tenants enters `all_tenants` and gives its reason.

The scope is a context variable, so it follows `await` and `sync_to_async`. The database backend
(`controlplane.tenancy.database`) sends the same scope to PostgreSQL with every statement; row-level
security is the second line of defence, where code forgets the first.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self, TypeVar

from django.db import models
from django.http import HttpRequest
from uuid_utils.compat import uuid7

from controlplane.tenancy.middleware import Middleware
from controlplane.tenancy.model_scope import allowed_pattern
from controlplane.tenancy.scope import ALL, current
from controlplane.tenancy.scope import tenant_scope as tenant_scope


class TenantScopeError(RuntimeError):
    """Raised when code touches tenant rows outside a scope, or rows of another tenant."""


def new_id() -> uuid.UUID:
    """Return a time-ordered id (UUID version 7): new rows are neighbours in the index."""
    return uuid7()


def current_tenant_id() -> uuid.UUID:
    """Return the current scope's tenant. Raises TenantScopeError when there is none."""
    scope = current.get()
    if not isinstance(scope, uuid.UUID):
        raise TenantScopeError("no tenant in scope")
    return scope


@contextlib.contextmanager
def all_tenants(*, reason: str) -> Iterator[None]:
    """Act across tenants. `reason` is for readers of the code; it must not be empty."""
    if not reason:
        raise ValueError("all_tenants needs a reason")
    token = current.set(ALL)
    try:
        yield
    finally:
        current.reset(token)


_M = TypeVar("_M", bound=models.Model)


class TenantQuerySet(models.QuerySet[_M]):
    """A query set that applies the rule of `TenantModel.save` to writes of many rows."""

    def bulk_create(self, objs: Iterable[_M], *args: Any, **kwargs: Any) -> list[_M]:
        rows = list(objs)
        for row in rows:
            _claim(row)
        return super().bulk_create(rows, *args, **kwargs)

    def update(self, **values: Any) -> int:
        if "tenant" in values or "tenant_id" in values:
            raise TenantScopeError("a row cannot move to another tenant")
        return super().update(**values)


def _claim(row: models.Model) -> None:
    """Give a row without a tenant the scope's; refuse rows of, and links to, another tenant."""
    assert isinstance(row, TenantModel)
    scope = current.get()
    kind = type(row).__name__
    if scope is None:
        raise TenantScopeError(f"{kind} saved with no tenant in scope")
    if isinstance(scope, uuid.UUID):
        if row.tenant_id is None:
            row.tenant_id = scope
        elif row.tenant_id != scope:
            raise TenantScopeError(f"{kind} belongs to another tenant")
    for field in row._meta.concrete_fields:
        if isinstance(field, models.ForeignKey) and field.is_cached(row):
            related = getattr(row, field.name)
            if isinstance(related, TenantModel) and related.tenant_id != row.tenant_id:
                raise TenantScopeError(f"{kind}.{field.name} belongs to another tenant")


class TenantManager(models.Manager[_M]):
    """Rows of the tenant in scope; all rows inside `all_tenants`; otherwise an error."""

    def get_queryset(self) -> models.QuerySet[_M]:
        queryset: models.QuerySet[_M] = TenantQuerySet(
            self.model,
            using=self._db,
            hints=self._hints,  # type: ignore[attr-defined]
        )
        scope = current.get()
        if scope is None:
            raise TenantScopeError(f"{self.model.__name__} queried with no tenant in scope")
        if scope == ALL:
            return queryset
        return queryset.filter(tenant_id=scope)

    def allowed(self) -> models.QuerySet[_M]:
        """Return the rows whose model the caller's key may name: see `model_scope`."""
        field = self.model.MODEL_FIELD  # type: ignore[attr-defined]
        assert field is not None, f"{self.model.__name__} rows are of no model"
        pattern, rows = allowed_pattern(), self.get_queryset()
        return rows if pattern is None else rows.filter(**{f"{field}__regex": pattern})


class TenantModel(models.Model):
    """A row that belongs to one tenant."""

    #: The path from a row to the name of its model (an adapter, an alias); None: it has none.
    MODEL_FIELD: ClassVar[str | None] = None

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    objects: ClassVar[TenantManager[Self]] = TenantManager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        _claim(self)
        super().save(*args, **kwargs)


class OperatorScopeMiddleware(Middleware):
    """Middleware that lets the operator admin act across tenants; no other address sets a scope."""

    def context(self, request: HttpRequest) -> contextlib.AbstractContextManager[None]:
        if request.path.startswith("/admin/"):
            return all_tenants(reason="the operator admin")
        return contextlib.nullcontext()
