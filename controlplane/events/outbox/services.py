"""Store events. The packages that change things call `publish`; they know no receiver."""

from __future__ import annotations

from typing import Any

from django.db import connection, transaction

from controlplane.events.outbox.models import EventType, OutboxEvent
from controlplane.infra.hooks import Hook

#: Called after the commit of an event.
event_stored = Hook[[], None]()


def publish(type: EventType, **data: Any) -> OutboxEvent:
    """Store an event of the tenant in scope, in the transaction of its change.

    So receivers hear of a change if and only if it was made.

    data  values that JSON has; no secrets, prompts or answers
    Raises TransactionManagementError outside a transaction.
    """
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError(
            "publish an event in the transaction of its change"
        )
    event = OutboxEvent.objects.create(type=type, data=data)
    transaction.on_commit(event_stored, robust=True)
    return event
