"""All changes to datasets, training runs and schedules that callers ask for.

They act for the tenant in scope. Changes by the trainer are in `execution`, by the clock in
`schedules`.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
from typing import Any

from celery import signature
from django.db import transaction
from django.utils import timezone
from kombu.exceptions import OperationalError

from contract import chat_rows
from controlplane.adapters.models import Adapter
from controlplane.adapters.services import adapter_create
from controlplane.audit.services import record
from controlplane.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from controlplane.infra import storage
from controlplane.limits import quotas
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.tenants.models import User, is_slug, slug_validator
from controlplane.training import contents, cron, dataset_checks, picking, size
from controlplane.training.hyperparameters import checked_hyperparameters
from controlplane.training.models import Dataset, Schedule, TrainingRun, dataset_key

log = logging.getLogger(__name__)

#: The name of the task that trains; its module imports this one.
EXECUTE_TASK = "controlplane.training.tasks.training_run_execute"
MAX_DATASET_BYTES = 32 * 1024**2
#: A queued run that did not start within this time is sent again: its message may be lost.
QUEUE_LEASE = dt.timedelta(minutes=10)

Status = TrainingRun.Status


def dataset_upload(*, name: str, content: bytes) -> Dataset:
    """Store chat JSONL under a name, and replace an existing dataset of this name for later runs.

    Raises InvalidRequest with the invalid lines, or when there is no room for them,
    PayloadTooLarge, RateLimited when several of the tenant are being checked, or Unavailable when
    the store does not answer.
    """
    if not is_slug(name):
        raise InvalidRequest(str(slug_validator.message), param="name")
    if len(content) > MAX_DATASET_BYTES:
        raise PayloadTooLarge(
            f"A dataset can have at most {MAX_DATASET_BYTES} bytes.", param="body"
        )
    with dataset_checks.place(current_tenant_id()):
        found = chat_rows.lint(content)
    if found.problems:
        raise InvalidRequest(found.complaint, param="body", code="invalid_dataset")
    fields = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "num_bytes": len(content),
        "num_rows": found.num_rows,
    }
    tenant_id = current_tenant_id()
    contents.content_begin(tenant_id, str(fields["sha256"]), len(content))
    try:
        storage.put_bytes(dataset_key(tenant_id, str(fields["sha256"])), content)
    except storage.STORAGE_ERRORS as error:
        raise Unavailable("The object store does not answer.") from error
    with transaction.atomic():
        known = Dataset.objects.select_for_update().filter(name=name).first()
        before = {field: getattr(known, field) for field in fields} if known else None
        dataset, is_new = Dataset.objects.update_or_create(name=name, defaults=fields)
        action = "created" if is_new else "changed"
        record(action, dataset, before=before, after={"name": name, **fields})
    return dataset


def dataset_get(*, name: str, param: str | None = None) -> Dataset:
    """Return the dataset of this name. Raises NotFound."""
    dataset = Dataset.objects.filter(name=name).first() if is_slug(name) else None
    if dataset is None:
        raise NotFound("There is no such dataset.", param=param)
    return dataset


def _locked(dataset: Dataset) -> Dataset:
    """Return the dataset as it is until the transaction ends. Raises NotFound."""
    locked = Dataset.objects.select_for_update().filter(pk=dataset.pk).first()
    if locked is None:
        raise NotFound("There is no such dataset.", param="dataset")
    return locked


def training_run_create(
    *,
    adapter_name: str,
    dataset_name: str,
    hyperparameters: dict[str, Any] | None = None,
    base_model_name: str | None = None,
    created_by: User | None = None,
) -> TrainingRun:
    """Queue a training run; its result becomes the adapter's next version.

    base_model_name   the base of a new adapter, which is then made; optional when there is only
                      one base model
    Raises InvalidRequest, also for more steps or tokens than a run may have, NotFound for the
    dataset, Conflict for another base model and for one that has been shut down, RateLimited when
    the tenant has too many runs.
    """
    checked = checked_hyperparameters(hyperparameters)
    with transaction.atomic():
        quotas.check("training_runs", retry_after_s=_room_in_s)
        dataset = dataset_get(name=dataset_name, param="dataset")
        size.check(checked, dataset)
        adapter = _adapter_for(adapter_name, base_model_name)
        if adapter.base_model.is_shut_down:
            base_model = adapter.base_model
            raise Conflict(
                f"{base_model.name} was shut down on {base_model.shutdown_date}. Adapters of it "
                "can no longer be trained.",
                param="adapter",
            )
        return training_run_enqueue(
            adapter=adapter, dataset=dataset, hyperparameters=checked, created_by=created_by
        )


@transaction.atomic
def training_run_enqueue(
    *,
    adapter: Adapter,
    dataset: Dataset,
    hyperparameters: dict[str, Any],
    created_by: User | None = None,
) -> TrainingRun:
    """Make a queued run with checked hyperparameters; send it to Celery after the commit.

    Raises RateLimited when the tenant has too many runs.
    """
    quotas.check("training_runs", retry_after_s=_room_in_s)
    if not Adapter.objects.select_for_update(no_key=True).filter(pk=adapter.pk).exists():
        raise NotFound("There is no such adapter.", param="adapter")
    # Locked, so that its rows are not replaced and removed before other processes see the run.
    dataset = _locked(dataset)
    run = TrainingRun.objects.create(
        adapter=adapter,
        dataset=dataset,
        dataset_sha256=dataset.sha256,
        hyperparameters=hyperparameters,
        created_by=created_by,
        lease_until=queue_lease_until(),
    )
    after = {
        "adapter": adapter.name,
        "dataset": dataset.name,
        "dataset_sha256": dataset.sha256,
        "hyperparameters": hyperparameters,
    }
    record("created", run, after=after)
    transaction.on_commit(lambda: training_run_send(run))
    return run


def queue_lease_until() -> dt.datetime:
    """Return when a run that is queued now is sent again: in minutes, or as the window opens."""
    later, opens_at = timezone.now() + QUEUE_LEASE, picking.window_opens_at()
    return later if opens_at is None else min(later, opens_at)


def runs_active() -> int:
    """Return the number of the tenant's runs that wait or run."""
    return TrainingRun.objects.filter(status__in=TrainingRun.ACTIVE).count()


def _room_in_s() -> float:
    """Estimate when one of the tenant's runs ends: from the trainer's progress, or some minutes."""
    running = TrainingRun.objects.filter(status=Status.RUNNING).values_list("progress", flat=True)
    left = [progress["eta_s"] for progress in running if progress.get("eta_s")]
    return float(min(max(min(left, default=300.0), 30.0), 3600.0))


def training_run_send(run: TrainingRun) -> None:
    """Send a queued run to Celery. If that fails, a later tick does it."""
    try:
        signature(EXECUTE_TASK).delay(str(run.tenant_id), str(run.pk))
    except OperationalError:
        log.warning("a training run could not be queued yet", extra={"run_id": str(run.pk)})


def training_run_cancel(*, run: TrainingRun) -> TrainingRun:
    """Cancel a run; a running one ends within seconds. Doing it again changes nothing.

    Raises Conflict when the run has ended or is publishing.
    """
    # Set the flag first: it stops a queued run from starting, and a running one from publishing.
    _request_cancel(run)
    training_run_drop(run=run)
    run.refresh_from_db()
    if run.cancel_requested:
        return run
    raise Conflict(f"The run is {run.status} and can no longer be cancelled.")


@transaction.atomic
def _request_cancel(run: TrainingRun) -> None:
    going = TrainingRun.objects.filter(pk=run.pk, status__in=(Status.QUEUED, Status.RUNNING))
    if going.filter(cancel_requested=False).update(cancel_requested=True):
        record("cancel_requested", run)


@transaction.atomic
def training_run_drop(*, run: TrainingRun) -> None:
    """End a queued run that was cancelled."""
    queued = TrainingRun.objects.filter(pk=run.pk, status=Status.QUEUED, cancel_requested=True)
    now = timezone.now()
    if queued.update(status=Status.CANCELLED, finished_at=now, lease_until=None):
        record("ended", run, after={"status": Status.CANCELLED})


def schedule_set(
    *,
    adapter: Adapter,
    dataset_name: str,
    cron_line: str,
    timezone_name: str = "UTC",
    hyperparameters: dict[str, Any] | None = None,
    is_paused: bool = False,
) -> Schedule:
    """Make or replace the adapter's schedule.

    The first slot is the next one from now. Raises InvalidRequest that names the field, NotFound
    for the dataset.
    """
    checked = checked_hyperparameters(hyperparameters)
    next_run_at = _next_run_at(cron_line, timezone_name)
    fields = {
        "cron": cron_line,
        "timezone": timezone_name,
        "hyperparameters": checked,
        "is_paused": is_paused,
    }
    with transaction.atomic():
        dataset = _locked(dataset_get(name=dataset_name, param="dataset"))
        size.check(checked, dataset)
        known = Schedule.objects.select_for_update().filter(adapter=adapter).first()
        before = _audit_fields(known) if known else None
        schedule, is_new = Schedule.objects.update_or_create(
            adapter=adapter,
            defaults={**fields, "dataset": dataset, "next_run_at": next_run_at},
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
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "hyperparameters": schedule.hyperparameters,
        "is_paused": schedule.is_paused,
    }


def schedule_get(*, adapter: Adapter) -> Schedule:
    """Return the adapter's schedule. Raises NotFound."""
    schedule = Schedule.objects.filter(adapter=adapter).select_related("adapter", "dataset").first()
    if schedule is None:
        raise NotFound("The adapter has no schedule.")
    return schedule


@transaction.atomic
def schedule_delete(*, adapter: Adapter) -> None:
    """Delete the adapter's schedule; runs that it started continue. Raises NotFound."""
    schedule = Schedule.objects.select_for_update().filter(adapter=adapter).first()
    if schedule is None:
        raise NotFound("The adapter has no schedule.")
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


def _adapter_for(name: str, base_model_name: str | None) -> Adapter:
    adapter = None
    if is_slug(name):
        adapter = Adapter.objects.filter(name=name).select_related("base_model").first()
    if adapter is None:
        try:
            return adapter_create(name=name, base_model_name=base_model_name)
        except ApiError as error:
            if error.param == "name":  # this request calls the field `adapter`
                error.param = "adapter"
            raise
    if base_model_name not in (None, adapter.base_model.name):
        raise Conflict(
            f"{name} is an adapter of {adapter.base_model.name}; an adapter keeps its base model.",
            param="base_model",
        )
    return adapter
