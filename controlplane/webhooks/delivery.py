"""Deliver events to webhooks.

Every webhook is called by one process at a time (a lease in its row), one event after another; a
tenant has at most `MAX_OF_TENANT` calls at a time, the platform `MAX_AT_ONCE`. The webhook that was
tried longest ago is next. So a slow one costs others at most one of the places, for `TIMEOUT_S`.

An attempt is counted before it is made: a process that is killed loses no event. So a receiver may
see an event twice, with the same `webhook-id`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from controlplane.events.audit.services import record
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.metrics import WEBHOOK_ATTEMPTS
from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound import Bounds, CallFailed
from controlplane.infra.outbound.outbound_policy import Refused
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.webhooks import signing
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint

log = logging.getLogger(__name__)

#: Seconds from an attempt to the next; about two days in all.
RETRIES_S = (5, 300, 1800, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600)
MAX_ATTEMPTS = len(RETRIES_S) + 1
#: Share by which a pause is randomly shorter or longer.
JITTER = 0.2
TIMEOUT_S = 10.0
#: Time without a delivery after which a webhook that gave up on an event is disabled.
DISABLED_AFTER = dt.timedelta(hours=36)
MAX_AT_ONCE = 16
MAX_OF_TENANT = 2
#: Time of a lease, longer than any call.
_LEASE = dt.timedelta(seconds=60)
_CANDIDATES = 200
#: Interval at which new events are looked for.
_LOOK_S = 0.5
_BOUNDS = Bounds(connect_s=5.0, total_s=TIMEOUT_S, max_bytes=0)
_GONE = 410

Status = WebhookDelivery.Status


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One attempt, with all values that its thread needs."""

    tenant_id: uuid.UUID
    endpoint_id: uuid.UUID
    delivery_id: uuid.UUID
    url: str
    headers: dict[str, str]
    body: bytes
    #: The fence that its process wrote into the webhook's row.
    lease_until: dt.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    status: int | None
    error: str
    took_ms: int

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def deliver_due(for_s: float, look: Callable[[], object] = lambda: None) -> bool:
    """Deliver what is due; begin no call after `for_s` seconds. -> whether more may be due.

    Exception: while the last calls run, tenants without one of them still begin calls.

    look  called every `_LOOK_S`, to find new events
    """
    ends_at = time.monotonic() + for_s
    looks_at = time.monotonic() + _LOOK_S
    running: dict[Future[Outcome], Call] = {}
    with ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="webhook") as pool:
        while True:
            if time.monotonic() >= looks_at:
                look()
                looks_at = time.monotonic() + _LOOK_S
            is_late = time.monotonic() >= ends_at
            begun: list[Call] = []
            if not is_late:
                begun = _claim(list(running.values()), MAX_OF_TENANT)
            elif running and time.monotonic() < ends_at + TIMEOUT_S:
                begun = _claim(list(running.values()), 1)
            for call in begun:
                running[pool.submit(_call, call)] = call
            if not running:
                return is_late
            done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                call = running.pop(future)
                with tenant_scope(call.tenant_id):
                    _conclude(call, future.result())


def _claim(running: list[Call], most_of_tenant: int = MAX_OF_TENANT) -> list[Call]:
    """Take the next webhooks, as many as there are places."""
    room = MAX_AT_ONCE - len(running)
    if room <= 0:
        return []
    by_tenant = Counter(call.tenant_id for call in running)
    calls: list[Call] = []
    for tenant_id, endpoint_id in _candidates():
        if len(calls) >= room:
            break
        if by_tenant[tenant_id] >= most_of_tenant:
            continue
        with tenant_scope(tenant_id):
            call = _take(endpoint_id)
        if call is not None:
            calls.append(call)
            by_tenant[tenant_id] += 1
    return calls


def _candidates() -> list[tuple[uuid.UUID, uuid.UUID]]:
    now = timezone.now()
    with all_tenants(reason="the next webhooks are chosen among all tenants"):
        waiting = WebhookDelivery.objects.filter(
            endpoint=OuterRef("pk"), status=Status.PENDING, next_attempt_at__lte=now
        )
        rows = WebhookEndpoint.objects.filter(
            Q(lease_until=None) | Q(lease_until__lt=now),
            Exists(waiting),
            is_enabled=True,
            tenant__status=Tenant.Status.ACTIVE,
        ).order_by(F("tried_at").asc(nulls_first=True))
        return list(rows.values_list("tenant_id", "pk")[:_CANDIDATES])


@transaction.atomic
def _take(endpoint_id: uuid.UUID) -> Call | None:
    """Lease a webhook and count an attempt of its next delivery; None: another was faster."""
    now = timezone.now()
    free = WebhookEndpoint.objects.filter(
        Q(lease_until=None) | Q(lease_until__lt=now), pk=endpoint_id, is_enabled=True
    )
    lease_until = now + _LEASE
    if not free.update(lease_until=lease_until, tried_at=now):
        return None
    endpoint = WebhookEndpoint.objects.get(pk=endpoint_id)
    delivery = (
        endpoint.deliveries.filter(status=Status.PENDING, next_attempt_at__lte=now)
        .select_related("event")
        .order_by("next_attempt_at")
        .first()
    )
    if delivery is None:
        _release(endpoint_id)
        return None
    try:
        keys = _keys(endpoint, now)
    except signing.Unreadable:
        _disable(endpoint, "Its secret can no longer be read: delete it and make a new one.")
        return None
    delivery.attempts += 1
    delivery.attempted_at = now
    delivery.next_attempt_at = now + _pause(delivery.attempts)
    delivery.save(update_fields=["attempts", "attempted_at", "next_attempt_at"])
    event, body = delivery.event, signing.body_of(delivery.event)
    headers = signing.headers_of(event.public_id, int(now.timestamp()), body, keys)
    headers["Content-Type"] = "application/json"
    ids = endpoint.tenant_id, endpoint.pk, delivery.pk
    return Call(*ids, endpoint.url, headers, body, lease_until)


def _keys(endpoint: WebhookEndpoint, now: dt.datetime) -> list[str]:
    """Return the secrets that sign now, the current one first. Raises signing.Unreadable."""
    sealed = [endpoint.sealed_secret]
    if endpoint.old_sealed_secret and endpoint.old_secret_until and endpoint.old_secret_until > now:
        sealed.append(endpoint.old_sealed_secret)
    return [signing.unseal(bytes(secret)) for secret in sealed]


def _pause(attempts: int) -> dt.timedelta:
    """Return the time until the next attempt, after this number of them."""
    usual = RETRIES_S[min(attempts, len(RETRIES_S)) - 1]
    return dt.timedelta(seconds=usual * random.uniform(1 - JITTER, 1 + JITTER))


def _call(call: Call) -> Outcome:
    """Make the call. Runs in a thread, without the database."""
    began_at = time.monotonic()
    status, error = None, ""
    try:
        with outbound.call(
            "POST", call.url, headers=call.headers, body=call.body, bounds=_BOUNDS
        ) as answer:
            status = answer.status
            error = "" if 200 <= status < 300 else f"It answered {status}."
    except (Refused, CallFailed) as failure:
        error = str(failure)
    except Exception:
        log.exception("a webhook could not be called")
        error = "It could not be called: an error of the platform."
    return Outcome(status, error[:200], int((time.monotonic() - began_at) * 1000))


@transaction.atomic
def _conclude(call: Call, outcome: Outcome) -> None:
    """Write an attempt's outcome, and release the webhook."""
    now = timezone.now()
    endpoint = WebhookEndpoint.objects.select_for_update().filter(pk=call.endpoint_id).first()
    delivery = WebhookDelivery.objects.filter(pk=call.delivery_id).first()
    WEBHOOK_ATTEMPTS.labels("succeeded" if outcome.is_success else "failed").inc()
    if endpoint is None or delivery is None:
        return  # it was deleted during the call
    if endpoint.lease_until != call.lease_until and not outcome.is_success:
        return  # this process was asleep, and another has the webhook: its attempt counts
    delivery.response_status, delivery.error = outcome.status, outcome.error
    delivery.took_ms = outcome.took_ms
    if endpoint.lease_until == call.lease_until:
        endpoint.lease_until = None
    if outcome.is_success:
        delivery.status, delivery.next_attempt_at = Status.SUCCEEDED, None
        endpoint.failing_since = None
    else:
        endpoint.failing_since = endpoint.failing_since or now
        if delivery.status == Status.PENDING and delivery.attempts >= MAX_ATTEMPTS:
            delivery.status, delivery.next_attempt_at = Status.FAILED, None
    changed = ["status", "next_attempt_at", "response_status", "error", "took_ms"]
    delivery.save(update_fields=changed)
    endpoint.save(update_fields=["lease_until", "failing_since"])
    log.info("webhook called", extra=_log_fields(call, delivery, outcome))
    if outcome.status == _GONE:
        _disable(endpoint, "It answered 410 (Gone).")
    elif delivery.status == Status.FAILED and endpoint.failing_since is not None:
        if now - endpoint.failing_since >= DISABLED_AFTER:
            _disable(endpoint, f"It failed for {(now - endpoint.failing_since).days + 1} days.")


def _log_fields(call: Call, delivery: WebhookDelivery, outcome: Outcome) -> dict[str, object]:
    # Not the URL, whose path or query may be a secret.
    return {
        "webhook_id": str(call.endpoint_id),
        "event_id": call.headers["webhook-id"],
        "attempt": delivery.attempts,
        "status": outcome.status,
        "took_ms": outcome.took_ms,
    }


def _disable(endpoint: WebhookEndpoint, reason: str) -> None:
    """Disable a webhook, and tell the owners."""
    if not endpoint.is_enabled:
        return
    endpoint.is_enabled, endpoint.disabled_reason = False, reason
    endpoint.save(update_fields=["is_enabled", "disabled_reason"])
    waiting = endpoint.deliveries.filter(status=Status.PENDING)
    waiting.update(status=Status.CANCELLED, next_attempt_at=None)
    publish(EventType.WEBHOOK_DISABLED, webhook=str(endpoint.pk), reason=reason)
    record("disabled", endpoint, after={"is_enabled": False, "disabled_reason": reason})


def _release(endpoint_id: uuid.UUID) -> None:
    WebhookEndpoint.objects.filter(pk=endpoint_id).update(lease_until=None)
