"""All changes to schedules that callers ask for; `schedules` has those by the clock.

They act for the tenant in scope.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.errors import InvalidRequest, require
from controlplane.events.audit.services import record
from controlplane.training import cron
from controlplane.training.datasets.services import dataset_get, dataset_lock
from controlplane.training.models import Schedule
from controlplane.training.runs.hyperparameters import check_size, checked_hyperparameters
from controlplane.training.runs.services import validation_dataset_get
from controlplane.training.schedules import schedule_rules


def schedule_set(
    *,
    adapter: Adapter,
    dataset_name: str,
    cron_line: str,
    timezone_name: str = "UTC",
    hyperparameters: dict[str, Any] | None = None,
    validation_dataset_name: str | None = None,
    is_paused: bool = False,
    rules: Mapping[str, Any] | None = None,
) -> Schedule:
    """Make or replace the adapter's schedule.

    The first slot is the next one from now; missed ones are dropped.

    rules  as `schedule_rules.rules_checked` takes them
    Raises InvalidRequest that names the field, NotFound for the dataset.
    """
    checked = checked_hyperparameters(hyperparameters)
    next_run_at = _next_run_at(cron_line, timezone_name)
    fields = {
        "cron": cron_line,
        "timezone": timezone_name,
        "hyperparameters": checked,
        "is_paused": is_paused,
        **schedule_rules.rules_checked(rules or {}, timezone_name),
        "owed_slot": None,
        "not_before": None,
    }
    with transaction.atomic():
        # The schedule before the dataset, as a tick locks them.
        known = Schedule.objects.select_for_update().filter(adapter=adapter).first()
        dataset = dataset_lock(dataset_get(name=dataset_name, param="dataset"))
        validation = validation_dataset_get(validation_dataset_name, checked)
        check_size(checked, dataset.num_rows)
        before = _audit_fields(known) if known else None
        schedule, is_new = Schedule.objects.update_or_create(
            adapter=adapter,
            defaults={
                **fields,
                "dataset": dataset,
                "validation_dataset": validation,
                "next_run_at": next_run_at,
            },
        )
        record(
            "created" if is_new else "changed",
            schedule,
            before=before,
            after=_audit_fields(schedule),
        )
    return schedule


def _audit_fields(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a schedule that the audit trail records."""
    return {
        "adapter": schedule.adapter.name,
        "dataset": schedule.dataset.name,
        "validation_dataset": getattr(schedule.validation_dataset, "name", None),
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "hyperparameters": schedule.hyperparameters,
        "is_paused": schedule.is_paused,
        **schedule_rules.rules_of(schedule),
    }


def schedule_get(*, adapter: Adapter) -> Schedule:
    """Return the adapter's schedule. Raises NotFound."""
    found = Schedule.objects.filter(adapter=adapter).select_related("adapter", "dataset").first()
    return require(found, "The adapter has no schedule.")


@transaction.atomic
def schedule_delete(*, adapter: Adapter) -> None:
    """Delete the adapter's schedule; runs that it started continue. Raises NotFound."""
    schedule = Schedule.objects.select_for_update().filter(adapter=adapter).first()
    schedule = require(schedule, "The adapter has no schedule.")
    record("deleted", schedule, before=_audit_fields(schedule))
    schedule.delete()


def _next_run_at(cron_line: str, timezone_name: str) -> dt.datetime:
    if len(cron_line) > 100:
        raise InvalidRequest("A cron line can have at most 100 characters.", param="cron")
    try:
        cron.check_timezone(timezone_name)
    except ValueError as error:
        raise InvalidRequest(f"{timezone_name[:64]!r}: {error}.", param="timezone") from error
    try:
        return cron.next_slot(cron_line, timezone_name, timezone.now())
    except ValueError as error:
        raise InvalidRequest(f"{cron_line!r}: {error}.", param="cron") from error
