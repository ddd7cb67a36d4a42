"""All changes to training runs that callers ask for; `execution` has those by the trainer.

They act for the tenant in scope.
"""

from __future__ import annotations

import uuid
from typing import Any

from django.db import transaction
from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.adapters.services import adapter_create
from controlplane.errors import ApiError, Conflict, InvalidRequest, NotFound, require
from controlplane.events.audit.services import record
from controlplane.tenancy.model_scope import check_named
from controlplane.tenants.models import User, is_slug
from controlplane.training.datasets import versions
from controlplane.training.datasets.services import dataset_get, dataset_lock, dataset_version_get
from controlplane.training.models import Dataset, DatasetVersion, TrainingRun
from controlplane.training.runs import events, sending
from controlplane.training.runs.hyperparameters import (
    check_rows,
    check_size,
    checked_hyperparameters,
)
from controlplane.usage.limits import quotas

Status = TrainingRun.Status


def training_run_create(
    *,
    adapter_name: str,
    dataset_name: str,
    hyperparameters: dict[str, Any] | None = None,
    base_model_name: str | None = None,
    validation_dataset_name: str | None = None,
    created_by: User | None = None,
) -> TrainingRun:
    """Queue a training run; its result becomes the adapter's next version.

    validation_dataset_name  of rows to validate with, instead of a share of the dataset's
    base_model_name   the base of a new adapter, which is then made; optional when there is only
                      one base model
    Raises InvalidRequest, also for more steps or tokens than a run may have, NotFound for the
    dataset, Conflict for another base model and for one that has been shut down, RateLimited when
    the tenant has too many runs.
    """
    checked = checked_hyperparameters(hyperparameters)
    with transaction.atomic():
        quotas.check("training_runs", retry_after_s=_room_in_s)
        dataset, version = dataset_version_get(dataset_name, param="dataset")
        validation = validation_dataset_get(validation_dataset_name, checked)
        num_rows = dataset.num_rows if version is None else version.num_rows
        check_rows(num_rows)
        check_size(checked, num_rows)
        adapter = adapter_for(adapter_name, base_model_name)
        if adapter.base_model.is_shut_down:
            base_model = adapter.base_model
            raise Conflict(
                f"{base_model.name} was shut down on {base_model.shutdown_date}. Adapters of it "
                "can no longer be trained.",
                param="adapter",
            )
        return training_run_enqueue(
            adapter=adapter,
            dataset=dataset,
            version=version,
            validation_dataset=validation,
            hyperparameters=checked,
            created_by=created_by,
        )


@transaction.atomic
def training_run_enqueue(
    *,
    adapter: Adapter,
    dataset: Dataset | None,
    hyperparameters: dict[str, Any],
    version: DatasetVersion | None = None,
    validation_dataset: Dataset | None = None,
    created_by: User | None = None,
    **more: Any,
) -> TrainingRun:
    """Make a queued run with checked hyperparameters; send it to Celery after the commit.

    dataset  None: the rows are those of a file, which `more` names
    version  of the dataset; None: the current one
    more     further fields of the run
    Raises RateLimited when the tenant has too many runs.
    """
    quotas.check("training_runs", retry_after_s=_room_in_s)
    if not Adapter.objects.select_for_update(no_key=True).filter(pk=adapter.pk).exists():
        raise NotFound("There is no such adapter.", param="adapter")
    # Locked, so that its rows are not replaced and removed before other processes see the run.
    if dataset is not None:
        dataset = dataset_lock(dataset)
        rows: Dataset | DatasetVersion = dataset
        if version is not None:
            rows = versions.version_get(dataset, version.number, param="dataset")
        more |= {"dataset_sha256": rows.sha256, "num_rows": rows.num_rows}
        more["dataset_version"] = dataset.version if version is None else version.number
    if validation_dataset is not None:
        validation_dataset = dataset_lock(validation_dataset)
        more["validation_sha256"] = validation_dataset.sha256
    run = TrainingRun.objects.create(
        adapter=adapter,
        dataset=dataset,
        validation_dataset=validation_dataset,
        hyperparameters=hyperparameters,
        created_by=created_by,
        **more,
    )
    events.event_add(run, f"Created fine-tuning job: {run.public_id}")
    after = {
        "adapter": adapter.name,
        "dataset": dataset.name if dataset else None,
        "dataset_version": run.dataset_version,
        "dataset_sha256": run.dataset_sha256,
        "validation_dataset": validation_dataset.name if validation_dataset else None,
        "hyperparameters": hyperparameters,
    }
    record("created", run, after=after)
    transaction.on_commit(lambda: sending.run_send(run))
    return run


def adapter_for(name: str, base_model_name: str | None) -> Adapter:
    """Return the adapter that a run trains, and make it if there is none. Raises ApiError."""
    check_named(name, "adapter")
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
            f"{name} is an adapter of {adapter.base_model.name}; choose another name.",
            param="base_model",
        )
    return adapter


def validation_dataset_get(name: str | None, hyperparameters: dict[str, Any]) -> Dataset | None:
    """Return the dataset to validate with. Raises InvalidRequest, NotFound."""
    validation_check(name is not None, hyperparameters)
    return None if name is None else dataset_get(name=name, param="validation_dataset")


def validation_check(has_rows: bool, hyperparameters: dict[str, Any]) -> None:
    """Check that a run validates with rows of its own, a share of the others, or not at all.

    Raises InvalidRequest.
    """
    if has_rows and hyperparameters.get("validation_share"):
        raise InvalidRequest(
            "Give rows to validate with or a validation_share, not both.",
            param="validation_dataset",
        )
    if has_rows or hyperparameters.get("validation_share"):
        return
    for field in ("eval_steps", "patience"):
        if hyperparameters.get(field):
            raise InvalidRequest(
                "It needs rows to validate with: set validation_share, or name a dataset of them.",
                param=f"hyperparameters.{field}",
            )


def runs_active() -> int:
    """Return the number of the tenant's runs that wait or run."""
    return TrainingRun.objects.filter(status__in=TrainingRun.ACTIVE).count()


def _room_in_s() -> float:
    """Estimate when one of the tenant's runs ends: from the trainer's progress, or some minutes."""
    running = TrainingRun.objects.filter(status=Status.RUNNING).values_list("progress", flat=True)
    left = [progress["eta_s"] for progress in running if progress.get("eta_s")]
    return float(min(max(min(left, default=300.0), 30.0), 3600.0))


def training_run_cancel(*, run: TrainingRun) -> TrainingRun:
    """Cancel a run; a running one ends within seconds. A repeated call changes nothing.

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
    waiting = (Status.QUEUED, Status.PAUSED, Status.RUNNING)
    going = TrainingRun.objects.filter(pk=run.pk, status__in=waiting)
    if going.filter(cancel_requested=False).update(cancel_requested=True):
        record("cancel_requested", run)


@transaction.atomic
def training_run_drop(*, run: TrainingRun) -> None:
    """End a waiting run that was cancelled; let a queued run that was paused wait."""
    rows, now = TrainingRun.objects.filter(pk=run.pk), timezone.now()
    waiting = rows.filter(status__in=(Status.QUEUED, Status.PAUSED), cancel_requested=True)
    if waiting.update(status=Status.CANCELLED, finished_at=now, lease_until=None):
        events.event_add(run, "The job was cancelled")
        record("ended", run, after={"status": Status.CANCELLED})
    queued = rows.filter(status=Status.QUEUED, pause_requested=True)
    if queued.update(status=Status.PAUSED, pause_requested=False, lease_until=None):
        events.event_add(run, "The job was paused before it began")
        record("paused", run)


def training_run_get(*, run_id: uuid.UUID) -> TrainingRun:
    """Return the run with what it names. Raises NotFound."""
    related = ("adapter", "dataset", "validation_dataset", "version", "created_by")
    found = TrainingRun.objects.allowed().select_related(*related).filter(pk=run_id).first()
    return require(found, "There is no such training run.")
