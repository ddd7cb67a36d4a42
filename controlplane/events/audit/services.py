"""Write the audit trail, and verify that nobody has changed it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import uuid
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from django.db import connection, models, transaction
from django.utils import timezone

from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.origin import current_origin
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scope import current as current_scope
from controlplane.tenancy.scoping import TenantModel, all_tenants, new_id, tenant_scope

#: Names of fields with secret values.
_SECRET = re.compile(r"(?:.*_)?(?:secret|password|token|hmac|private_key|key_text)(?:_hash)?")
_PAGE = 1000


def record(
    action: str,
    resource: models.Model,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> AuditEvent:
    """Add an event to the trail of the resource's tenant, in the caller's transaction.

    So the event exists if and only if the change does. Other changes of the tenant wait until the
    transaction ends: call this last.

    action   what happened to the resource, in the past tense: "revoked"
    before   the changed fields with their old values
    after    the changed fields with their new values

    Raises TransactionManagementError outside a transaction, ValueError for a field whose name
    suggests a secret.
    """
    # Not type(): a request's user is a lazy object with another class name.
    kind = _snake(resource._meta.object_name or "")
    changed = _Resource(_tenant_of(resource), kind, str(resource.pk))
    return _add(action, changed, before, after)


def record_named(
    action: str,
    kind: str,
    name: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> AuditEvent:
    """Like `record`, for a resource without a row: adds to the trail of the tenant in scope."""
    scope = current_scope.get()
    tenant_id = scope if isinstance(scope, uuid.UUID) else None
    return _add(action, _Resource(tenant_id, kind, name[:64]), before, after)


@contextlib.contextmanager
def recorded_at_end() -> Iterator[list[AuditEvent]]:
    """Add the events of the block when it ends; after an exception, none.

    The block may make many changes, one after another: else it would hold a trail's lock while it
    waits for the rows of the next change, and others wait in the opposite order. Yields the
    events so far; the caller may remove some.
    """
    events: list[AuditEvent] = []
    token = _waiting.set(events)
    try:
        yield events
    finally:
        _waiting.reset(token)
    # All tenants share the platform's trail, so its lock is taken last.
    for event in sorted(events, key=lambda event: event.tenant_id is None):
        _append(event)


#: The events of the innermost `recorded_at_end`; None outside one.
_waiting: ContextVar[list[AuditEvent] | None] = ContextVar("audit_waiting", default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Resource:
    """The changed object."""

    tenant_id: uuid.UUID | None
    kind: str
    id: str


def _add(
    action: str,
    resource: _Resource,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
) -> AuditEvent:
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError(
            "record an audit event in the transaction of its change"
        )
    origin = current_origin()
    event = AuditEvent(
        id=new_id(),
        tenant_id=resource.tenant_id,
        occurred_at=timezone.now(),
        **dataclasses.asdict(origin),
        action=f"{resource.kind}.{action}",
        resource_type=resource.kind,
        resource_id=resource.id,
        before=_as_json(before),
        after=_as_json(after),
    )
    waiting = _waiting.get()
    if waiting is None:
        _append(event)
    else:
        waiting.append(event)
    return event


def _append(event: AuditEvent) -> None:
    """Make the event its chain's last, and save it."""
    with _chain_scope(event.tenant_id):
        lock_until_commit(f"audit {event.tenant_id}")  # the end of the chain
        last = _chain(event.tenant_id).order_by("-seq").first()
        event.seq = last.seq + 1 if last else 1
        event.prev_hash = last.hash if last else ""
        event.hash = event.digest()
        event.save(force_insert=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The last event of a chain. Stored elsewhere, it shows whether the chain was cut since."""

    seq: int
    hash: str


def chain_ids() -> list[uuid.UUID | None]:
    """Return the tenants that have a trail, and None for the platform's own."""
    with all_tenants(reason="all trails are verified"):
        rows = AuditEvent.objects.order_by("tenant_id").values_list("tenant_id", flat=True)
        return list(rows.distinct())


def verify(tenant_id: uuid.UUID | None, known: Head | None = None) -> tuple[Head, list[str]]:
    """Return the chain's last event, and its faults: none if nobody changed it.

    known  the last event of an earlier run, which must still be in the chain
    """
    head, faults = Head(0, ""), []
    for event in _events(tenant_id):
        if event.seq != head.seq + 1:
            faults.append(f"{_missing(head.seq + 1, event.seq - 1)} missing")
        elif event.prev_hash != head.hash:
            faults.append(f"event {event.seq} does not follow the event before it")
        if event.hash != event.digest():
            faults.append(f"event {event.seq} was changed")
        head = Head(event.seq, event.hash)
        if known and known.seq == head.seq and known.hash != head.hash:
            faults.append(f"event {event.seq} was replaced")
    if known and known.seq > head.seq:
        faults.append(f"{_missing(head.seq + 1, known.seq)} missing")
    return head, faults


def _events(tenant_id: uuid.UUID | None) -> Iterator[AuditEvent]:
    seq = -1
    while True:
        with _chain_scope(tenant_id):
            page = list(_chain(tenant_id).filter(seq__gt=seq).order_by("seq")[:_PAGE])
        yield from page
        if len(page) < _PAGE:
            return
        seq = page[-1].seq


def _missing(first: int, last: int) -> str:
    return f"event {first} is" if first == last else f"events {first} to {last} are"


def _chain(tenant_id: uuid.UUID | None) -> models.QuerySet[AuditEvent]:
    if tenant_id is None:
        return AuditEvent.objects.filter(tenant_id__isnull=True)
    return AuditEvent.objects.filter(tenant_id=tenant_id)


def _chain_scope(tenant_id: uuid.UUID | None) -> Any:
    if tenant_id is None:
        return all_tenants(reason="the platform's own trail")
    return tenant_scope(tenant_id)


def _tenant_of(resource: models.Model) -> uuid.UUID | None:
    if isinstance(resource, TenantModel):
        return resource.tenant_id
    if resource._meta.label == "tenants.Tenant":
        return uuid.UUID(str(resource.pk))
    scope = current_scope.get()
    return scope if isinstance(scope, uuid.UUID) else None


def _as_json(value: Any, name: str = "") -> Any:
    """Return the value as it is after a JSON round trip, so that its hash stays the same."""
    if _SECRET.fullmatch(name.lower()):
        raise ValueError(f"{name} may hold a secret: leave it out of the audit trail")
    if isinstance(value, Mapping):
        return {str(key): _as_json(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and abs(value) < 1e15:
        return value + 0.0  # the database has no negative zero
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]
