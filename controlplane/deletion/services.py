"""Delete versions, adapters and datasets of the tenant in scope.

A 409 names what still uses one; with `is_forced` the users are ended first: schedules are deleted,
and training runs cancelled. A run that publishes its result cannot be cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery import signature
from django.db import transaction
from django.db.models import Q, QuerySet
from kombu.exceptions import OperationalError

from controlplane.adapters import deletion
from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.aliases import services as aliases
from controlplane.aliases.protection import adapter_users
from controlplane.errors import Conflict
from controlplane.events.audit.services import record, recorded_at_end
from controlplane.training.datasets import sources, versions
from controlplane.training.models import Dataset, DatasetSource, Schedule, TrainingRun
from controlplane.training.runs import services as run_services
from controlplane.training.runs.kept import saved_states
from controlplane.training.schedules import services as schedule_services

#: A string, because its module imports one that this module imports.
REMOVE_TASK = "controlplane.adapters.tasks.deleted_versions_remove"
_SHOWN = 5


def version_delete(*, version: AdapterVersion) -> None:
    """Delete a version. Raises Conflict while it is being checked."""
    with transaction.atomic():
        deletion.version_delete(version=version)
        transaction.on_commit(_remove_soon)


def adapter_delete(*, adapter: Adapter, is_forced: bool = False) -> None:
    """Delete an adapter with its versions, its schedule and the runs that trained it.

    Aliases keep it, too: `is_forced` deletes those whose primary it is, and removes it as canary.
    Raises Conflict, which names what uses it; Unavailable when the store cannot forget the states
    of its runs.
    """
    schedules = Schedule.objects.filter(adapter=adapter)
    runs = TrainingRun.objects.filter(adapter=adapter)
    # Aliases and adapters are locked after the first event: the trail's lock must come last.
    with transaction.atomic(), recorded_at_end():
        if is_forced:
            aliases.adapter_release(adapter=adapter)
        # `training_run_enqueue` locks it too: no run begins between the check and the deletion.
        Adapter.objects.select_for_update().get(pk=adapter.pk)
        named = [f"the alias {name}" for name in adapter_users(adapter)]
        _end_users(f"The adapter {adapter.name}", schedules, runs, is_forced, named)
        stored = list(runs.filter(stored_step__isnull=False))
        deletion.adapter_rows_delete(adapter=adapter)
        saved_states.states_forget(stored)
        transaction.on_commit(_remove_soon)


def dataset_delete(*, dataset: Dataset, is_forced: bool = False) -> None:
    """Delete a dataset with its versions and its source; runs that have ended stay, without it.

    `contents_sweep` removes the stored rows. Raises Conflict, which names what uses it.
    """
    of_it = Q(dataset=dataset) | Q(validation_dataset=dataset)
    schedules, runs = Schedule.objects.filter(of_it), TrainingRun.objects.filter(of_it)
    with transaction.atomic():
        # `training_run_enqueue` locks it too: no run begins between the check and the deletion.
        dataset = Dataset.objects.select_for_update().get(pk=dataset.pk)
        versions.check_users(dataset.name)
        _end_users(f"The dataset {dataset.name}", schedules, runs, is_forced)
        before = {
            "name": dataset.name,
            "sha256": dataset.sha256,
            "num_bytes": dataset.num_bytes,
            "num_rows": dataset.num_rows,
        }
        record("deleted", dataset, before=before)
        for source in DatasetSource.objects.filter(name=dataset.name):
            sources.source_delete(source=source)
        dataset.delete()


def _end_users(
    what: str,
    schedules: QuerySet[Schedule],
    runs: QuerySet[TrainingRun],
    is_forced: bool,
    others: Sequence[str] = (),
) -> None:
    """End everything that uses it; raise Conflict if that is not allowed, or not possible."""
    active = list(runs.filter(status__in=TrainingRun.ACTIVE).order_by("created_at"))
    found = list(schedules.select_related("adapter"))
    names = [*others]
    names += [f"the schedule of {schedule.adapter.name}" for schedule in found]
    names += [f"the training run {run.pk} ({run.status})" for run in active]
    if others or (names and not is_forced):
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise Conflict(
            f"{what} is used by {', '.join(names[:_SHOWN])}{more}. End them first, or repeat the "
            "request with ?force=true.",
            code="in_use",
        )
    for run in active:
        if run.status == TrainingRun.Status.PUBLISHING:
            raise Conflict(
                f"The training run {run.pk} is publishing its result: try again in a minute.",
                code="in_use",
            )
        run_services.training_run_cancel(run=run)
    for schedule in found:
        schedule_services.schedule_delete(adapter=schedule.adapter)


def _remove_soon() -> None:
    """Queue the removal of the bytes once no gateway knows the version; the sweep repeats it."""
    countdown = deletion.SETTLED.total_seconds() + 1
    try:
        signature(REMOVE_TASK).apply_async(countdown=countdown, queue="ingest")
    except OperationalError:
        pass
