"""Publish one event for each tenant about its schedules' night, for webhooks and mails.

It waits until no run is active and no slot is near, so that a night is one event; at most
`MAX_WAIT`. It has numbers and names of adapters, no prompts and no answers.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections import Counter
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from controlplane.evaluations.models import GateDecision
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training.models import Schedule, ScheduleRun, TrainingRun

log = logging.getLogger(__name__)

#: Time before a slot in which the event waits for it.
QUIET = dt.timedelta(hours=3)
#: Longest wait of an outcome for its event.
MAX_WAIT = dt.timedelta(hours=12)
#: Age from which slots are no longer told.
_KEPT = dt.timedelta(days=2)
_TENANTS = 200
#: Number of adapters named for each outcome.
_MAX_NAMES = 20


def mornings_tell(now: dt.datetime | None = None) -> int:
    """Publish an event for each tenant with something new. -> their number."""
    now = now or timezone.now()
    with all_tenants(reason="find tenants whose schedules had slots"):
        rows = _untold(now).filter(tenant__status=Tenant.Status.ACTIVE)
        # Slots that were only skipped are told together with others.
        rows = rows.exclude(status=ScheduleRun.Status.SKIPPED)
        tenants = list(rows.order_by().values_list("tenant_id", flat=True).distinct()[:_TENANTS])
    return sum(_tell(tenant_id, now) for tenant_id in tenants)


def _untold(now: dt.datetime) -> Any:
    return ScheduleRun.objects.filter(reported_at=None, created_at__gt=now - _KEPT)


def _tell(tenant_id: uuid.UUID, now: dt.datetime) -> bool:
    try:
        with tenant_scope(tenant_id), transaction.atomic():
            lock_until_commit(f"morning {tenant_id}")
            return _tell_if_over(now)
    except Exception:  # continue with the others
        log.exception("a tenant was not told of its night", extra={"tenant_id": str(tenant_id)})
        return False


def _tell_if_over(now: dt.datetime) -> bool:
    rows = list(
        _untold(now).select_related("schedule__adapter", "training_run").order_by("created_at")
    )
    over = [row for row in rows if row.concluded_at is not None]
    if not any(row.status != ScheduleRun.Status.SKIPPED for row in over):
        return False
    is_late = now - min(row.created_at for row in over) >= MAX_WAIT
    if not is_late and (len(over) < len(rows) or _is_more_to_come(over, now)):
        return False
    publish(EventType.MORNING_READY, **_told(over, now))
    keys = [row.pk for row in over]
    ScheduleRun.objects.filter(pk__in=keys).update(reported_at=now)
    return True


def _is_more_to_come(rows: list[ScheduleRun], now: dt.datetime) -> bool:
    versions = [row.training_run.version_id for row in rows if row.training_run]
    if GateDecision.objects.filter(
        version__in=[each for each in versions if each], status=GateDecision.Status.WAITING
    ).exists():
        return True
    return Schedule.objects.filter(is_paused=False, next_run_at__lte=now + QUIET).exists()


def _told(rows: list[ScheduleRun], now: dt.datetime) -> dict[str, Any]:
    counts = Counter(row.state for row in rows)
    versions = [row.training_run.version_id for row in rows if row.training_run]
    decided = GateDecision.objects.filter(version__in=[each for each in versions if each])
    outcomes = Counter(decided.values_list("outcome", flat=True))
    added = [
        row.training_run.num_rows - row.rows_before
        for row in rows
        if row.training_run
        and row.training_run.num_rows is not None
        and row.rows_before is not None
    ]
    status = TrainingRun.Status
    return {
        "page": page_url(now),
        "slots": len(rows),
        "succeeded": counts[status.SUCCEEDED],
        "failed": counts[status.FAILED],
        "skipped": counts[ScheduleRun.Status.SKIPPED],
        "missed": counts[ScheduleRun.Status.MISSED],
        "promoted": outcomes["promoted"],
        "held": outcomes["held"],
        "rows_added": sum(added),
        "failed_adapters": _names(rows, {status.FAILED}),
        "missed_adapters": _names(rows, {ScheduleRun.Status.MISSED}),
    }


def _names(rows: list[ScheduleRun], states: set[Any]) -> list[str]:
    found = {row.schedule.adapter.name for row in rows if row.state in states}
    return sorted(found)[:_MAX_NAMES]


def moment_of(text: str) -> dt.datetime | None:
    """Return the time that an address names; None: it is none, or out of range."""
    try:
        found = dt.datetime.fromisoformat(text.strip().replace(" ", "+"))
        found = found if found.tzinfo else found.replace(tzinfo=dt.UTC)
        found = found.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return None
    # The page looks days back and ahead, and shows times in other zones.
    return found if 2 < found.year < 9998 else None


def page_url(until: dt.datetime) -> str:
    """Return the address of the morning page for a time."""
    told = urlencode({"until": until.astimezone(dt.UTC).isoformat(timespec="seconds")})
    return f"{settings.BASE_URL}/console/morning?{told}"
