"""Make fine-tuning jobs: training runs over files. All act for the tenant in scope."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from controlplane.errors import ApiError, InvalidRequest, require
from controlplane.gateway.fine_tuning.dataset_files import (
    method_check,
    take_over,
    training_file_get,
)
from controlplane.gateway.fine_tuning.warm_start import Start, start_of
from controlplane.tenancy.model_scope import check_named, check_unbound
from controlplane.tenancy.public_ids import parse_id
from controlplane.tenants.auth import Principal
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events
from controlplane.training.runs import services as run_services
from controlplane.training.runs.hyperparameters import (
    check_rows,
    check_size,
    checked_hyperparameters,
)
from controlplane.usage.limits import quotas

#: OpenAI's rule for `n_epochs: "auto"`: three, changed so that rows times epochs is in this range.
AUTO_EPOCHS, LEAST_EXAMPLES, MOST_EXAMPLES = 3, 100, 25_000
MOST_AUTO_EPOCHS = 25
AUTO_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobForm:
    """A client's request for a job.

    hyperparameters  as the trainer names them, without those that are "auto"
    place            where in the body epochs, batch size and learning rate are
    """

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    hyperparameters: dict[str, Any]
    place: str = "hyperparameters"
    metadata: dict[str, str] | None = None


def jobs_list() -> QuerySet[TrainingRun]:
    """Return the tenant's runs with the rows that a job shows."""
    related = ("adapter__base_model", "dataset", "tenant", "version")
    return TrainingRun.objects.allowed().select_related(*related)


def job_get(public_id: str) -> TrainingRun:
    """Return the run of this job's id. Raises NotFound."""
    pk = parse_id(TrainingRun.PREFIX, public_id)
    found = jobs_list().filter(pk=pk).first() if pk else None
    return require(found, "There is no such fine-tuning job.")


def job_create(*, principal: Principal, form: JobForm) -> TrainingRun:
    """Queue a run over a file; its result is an adapter's next version.

    Raises ApiError that names the field: InvalidRequest, NotFound for the model and the files,
    RateLimited when the tenant has too many runs, Unavailable when the store does not answer.
    """
    start = start_of(principal, form.model)
    adapter_name = _adapter_name(form, start)
    with _own_names(form):
        given = _given(form, start)
        run_services.validation_check(form.validation_file is not None, given)
    training = training_file_get(form.training_file, "training_file")
    validation = None
    if form.validation_file is not None:
        validation = training_file_get(form.validation_file, "validation_file")
    with transaction.atomic():
        quotas.check("training_runs")  # before the bytes are copied
    method = given.get("method", "supervised")
    rows = take_over(training, "training_file")
    method_check(rows, method, "training_file")
    if validation is not None:
        method_check(take_over(validation, "validation_file"), method, "validation_file")
    num_rows = rows.num_rows
    with _own_names(form), transaction.atomic():
        hyperparameters = _resolved(given, num_rows)
        check_rows(num_rows)
        check_size(hyperparameters, num_rows)
        run = run_services.training_run_enqueue(
            adapter=run_services.adapter_for(adapter_name, start.base_model.name),
            dataset=None,
            hyperparameters=hyperparameters,
            created_by=principal.user,
            dataset_sha256=training.sha256,
            num_rows=num_rows,
            training_file_id=training.pk,
            validation_file_id=validation.pk if validation else None,
            validation_sha256=validation.sha256 if validation else "",
            warm_start=start.version,
            warm_start_name=start.name,
            metadata=form.metadata,
        )
        events.event_add(run, f"Validated training file: {training.public_id}", rows=num_rows)
        events.event_add(run, "Files validated, moving job to queued state")
    return job_get(run.public_id)


def _adapter_name(form: JobForm, start: Start) -> str:
    """Return the name of the adapter to train. Raises PermissionDenied."""
    name = form.suffix
    if name is None and start.version is not None:
        name = start.version.adapter.name
    if name is not None:
        check_named(name, "suffix")
        return name
    check_unbound(
        "Without a suffix the adapter gets a new name: give a suffix.",
        "suffix",
    )
    return f"ft-{uuid.uuid4().hex[:12]}"


def _given(form: JobForm, start: Start) -> dict[str, Any]:
    """Return the hyperparameters that are given, with those of the start. Raises InvalidRequest."""
    given = checked_hyperparameters(form.hyperparameters)
    for name, value in start.fixed.items():
        if name in given and given[name] != value:
            raise InvalidRequest(
                f"The run begins from {start.name}, whose {name} is {value}: leave it out.",
                param=f"hyperparameters.{name}",
            )
    return checked_hyperparameters(given | start.fixed)


def _resolved(given: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """Return all hyperparameters of the run, with values for automatic ones."""
    found = {"batch_size": max(1, min(AUTO_BATCH_SIZE, num_rows)), **given}
    if found.get("max_steps") is None:
        found.setdefault("epochs", auto_epochs(num_rows))
    return checked_hyperparameters(found)


def auto_epochs(num_rows: int) -> int:
    """Return the epochs of `n_epochs: "auto"` for a number of rows."""
    rows = max(1, num_rows)
    if rows * AUTO_EPOCHS < LEAST_EXAMPLES:
        return min(MOST_AUTO_EPOCHS, -(-LEAST_EXAMPLES // rows))
    if rows * AUTO_EPOCHS > MOST_EXAMPLES:
        return max(1, MOST_EXAMPLES // rows)
    return AUTO_EPOCHS


@contextlib.contextmanager
def _own_names(form: JobForm) -> Iterator[None]:
    """Give errors inside the block the field names of a job's body."""
    names = {
        "adapter": "suffix",
        "dataset": "training_file",
        "validation_dataset": "validation_file",
        "base_model": "suffix",
        "hyperparameters": form.place,
        "hyperparameters.epochs": f"{form.place}.n_epochs",
        "hyperparameters.batch_size": f"{form.place}.batch_size",
        "hyperparameters.learning_rate": f"{form.place}.learning_rate_multiplier",
        "hyperparameters.beta": f"{form.place}.beta",
    }
    if form.place.startswith("method.reinforcement"):
        names["hyperparameters.eval_steps"] = f"{form.place}.eval_interval"
    grader = "hyperparameters.grader"
    try:
        yield
    except ApiError as error:
        if error.param is not None and error.param.startswith(grader):
            error.param = f"method.reinforcement.grader{error.param.removeprefix(grader)}"
        elif error.param is not None:
            extra = error.param.replace("hyperparameters.", "lorikeet.", 1)
            error.param = names.get(error.param, extra)
        raise
