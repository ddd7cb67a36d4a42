"""Datasets, training runs with their progress, and the schedules that start them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from contract.training.job import RANGES
from controlplane.adapters.models import Adapter
from controlplane.adapters.services import adapter_get
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.charts import loss_chart
from controlplane.console.evaluation_rows import habit_rows
from controlplane.console.forms import ErrorsShown, add_service_error
from controlplane.console.training_forms import DatasetForm, ScheduleForm, TrainForm
from controlplane.console.views.datasets import history_of
from controlplane.errors import ApiError, PermissionDenied
from controlplane.evaluations.models import GateDecision
from controlplane.tenants.auth import Permission
from controlplane.training.datasets import preview, reports
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import (
    Dataset,
    Schedule,
    ScheduleRun,
    TrainingEvent,
    TrainingRun,
)
from controlplane.training.runs import cost, pausing, picking
from controlplane.training.runs import services as run_services
from controlplane.training.runs.hyperparameters import checked_hyperparameters
from controlplane.training.schedules import schedules
from controlplane.training.schedules import services as schedule_services
from controlplane.training.schedules.schedule_rules import rules_of

Status = TrainingRun.Status

#: States in which a run's page reloads its status.
BUSY_STATES = tuple(status.value for status in TrainingRun.ACTIVE)
NUM_RUNS = 50
#: Number of rows that a dataset's page shows, and of characters of each.
NUM_PREVIEW = 10
MAX_ROW_CHARS = 4000
#: Number of a run's newest events on its page.
NUM_EVENTS = 20
#: Number of a schedule's newest slots on its page.
NUM_SLOTS = 30


@require_safe
@member_page
def training(request: ConsoleRequest) -> HttpResponse:
    context = _training_context()
    context["train_form"] = TrainForm(initial={"adapter": request.GET.get("adapter", "")})
    return render(request, "console/training.html", context)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def upload_dataset(request: ConsoleRequest) -> HttpResponse:
    """Upload a dataset through this process: its size is bounded."""
    form = DatasetForm(request.POST, request.FILES)
    if form.is_valid():
        # With one byte more than the limit the service refuses it.
        content = form.cleaned_data["file"].read(dataset_services.MAX_DIRECT_BYTES + 1)
        try:
            content, formats = dataset_services.rows_convert(content)
            dataset = dataset_services.dataset_upload(
                name=form.cleaned_data["name"],
                content=content,
                appends=form.cleaned_data["append"],
            )
        except ApiError as error:
            add_service_error(form, error.message, "file" if error.param == "body" else error.param)
        else:
            origin = f", converted from {formats}" if formats else ""
            told = f"“{dataset.name}” is stored, with {dataset.num_rows} chats{origin}."
            messages.success(request, told)
            return redirect("console:training")
    context = _training_context() | {"dataset_form": form}
    return render(request, "console/training.html", context, status=422)


@require_safe
@member_page
def dataset(request: ConsoleRequest, name: str) -> HttpResponse:
    """Show the counts of a dataset's rows; people who may replace them see the first ones."""
    found = dataset_services.dataset_get(name=name)
    rows: list[dict[str, Any]] = []
    problem = ""
    try:
        if request.member.can_train:
            rows = preview.rows_preview(found, NUM_PREVIEW, by=request.member.principal)
    except PermissionDenied:
        problem = (
            "They are captured requests: reading them needs the right to read prompts and answers."
        )
    except ApiError as error:
        problem = error.message
    context = {
        "dataset": found,
        "report": reports.report_of(found, by=request.member.principal),
        "rows": [(row["line"], _shown(row["row"])) for row in rows],
        "problem": problem,
        **history_of(found),
    }
    return render(request, "console/dataset.html", context)


def _shown(row: Any) -> str:
    """Return a row as text of a bounded length; the template escapes it."""
    text = json.dumps(row, ensure_ascii=False, indent=2)
    return text if len(text) <= MAX_ROW_CHARS else f"{text[:MAX_ROW_CHARS]} …"


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def start_run(request: ConsoleRequest) -> HttpResponse:
    form = TrainForm(request.POST)
    if form.is_valid():
        with ErrorsShown(form):
            base_model = form.cleaned_data.get("base_model")
            validation = form.cleaned_data["validation_dataset"]
            started = run_services.training_run_create(
                adapter_name=form.cleaned_data["adapter"],
                dataset_name=form.cleaned_data["dataset"].name,
                hyperparameters=form.hyperparameters(),
                base_model_name=base_model.name if base_model else None,
                validation_dataset_name=validation.name if validation else None,
                created_by=request.user,
            )
            return redirect("console:run", started.id)
    context = _training_context() | {"train_form": form}
    return render(request, "console/training.html", context, status=422)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def run_cost(request: ConsoleRequest) -> HttpResponse:
    """Render the cost of the run that the form describes; "" while it lacks a name."""
    form = TrainForm(request.POST)
    context: dict[str, Any] = {}
    if not form.is_valid():
        faults = form.errors.get_json_data().items()
        named = [(form.fields[name], error) for name, error in faults if name in RANGES]
        context["problems"] = [f"{field.label}: {error[0]['message']}" for field, error in named]
        return render(request, "console/_cost.html", context)
    adapter = Adapter.objects.filter(name=form.cleaned_data["adapter"]).first()
    base = adapter.base_model if adapter else form.chosen_base()
    try:
        hyperparameters = checked_hyperparameters(form.hyperparameters())
        found = cost.run_cost(
            form.cleaned_data["dataset"], hyperparameters, base.name if base else ""
        )
        context = {"cost": found, "kept": hyperparameters.get("checkpoints")}
    except ApiError as error:
        context["problems"] = [error.message]
    return render(request, "console/_cost.html", context)


@require_safe
@member_page
def run(request: ConsoleRequest, run_id: uuid.UUID) -> HttpResponse:
    return render(request, "console/run.html", _run_context(run_id))


@require_safe
@member_page
def run_status(request: ConsoleRequest, run_id: uuid.UUID) -> HttpResponse:
    """Render the part of a run's page that changes during the training."""
    return render(request, "console/_run.html", _run_context(run_id))


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def cancel_run(request: ConsoleRequest, run_id: uuid.UUID) -> HttpResponse:
    return _changed(request, run_id, run_services.training_run_cancel)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def pause_run(request: ConsoleRequest, run_id: uuid.UUID) -> HttpResponse:
    return _changed(request, run_id, pausing.training_run_pause)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def resume_run(request: ConsoleRequest, run_id: uuid.UUID) -> HttpResponse:
    return _changed(request, run_id, pausing.training_run_resume)


def _changed(
    request: ConsoleRequest, run_id: uuid.UUID, change: Callable[..., TrainingRun]
) -> HttpResponse:
    with ErrorsShown(request):
        change(run=run_services.training_run_get(run_id=run_id))
    return redirect("console:run", run_id)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.TRAINING_WRITE)
def schedule(request: ConsoleRequest, name: str) -> HttpResponse:
    adapter = adapter_get(name=name)
    existing = Schedule.objects.filter(adapter=adapter).select_related("dataset").first()
    form = ScheduleForm(request.POST or None, initial=_schedule_initial(existing))
    if request.method == "POST" and form.is_valid() and _save_schedule(form, adapter, existing):
        messages.success(request, f"The schedule of “{adapter.name}” is set.")
        return redirect("console:adapter", adapter.name)
    context = {
        "adapter": adapter,
        "schedule": existing,
        "form": form,
        "datasets": Dataset.objects.exists(),
        "history": _history(existing),
    }
    status = 422 if form.errors else 200
    return render(request, "console/schedule.html", context, status=status)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def delete_schedule(request: ConsoleRequest, name: str) -> HttpResponse:
    adapter = adapter_get(name=name)
    schedule_services.schedule_delete(adapter=adapter)
    messages.success(request, f"“{adapter.name}” is no longer retrained on a schedule.")
    return redirect("console:adapter", adapter.name)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def run_schedule(request: ConsoleRequest, name: str) -> HttpResponse:
    """Start the schedule's run now."""
    adapter = adapter_get(name=name)
    with ErrorsShown(request):
        row = schedules.schedule_run_now(
            schedule_services.schedule_get(adapter=adapter), created_by=request.user
        )
        return redirect("console:run", row.training_run_id)
    return redirect("console:schedule", adapter.name)


def _save_schedule(form: ScheduleForm, adapter: Adapter, existing: Schedule | None) -> bool:
    data = form.cleaned_data
    with ErrorsShown(form):
        schedule_services.schedule_set(
            adapter=adapter,
            dataset_name=data["dataset"].name,
            cron_line=data["cron"],
            timezone_name=data["timezone"],
            # The form lacks these fields; values set through the API stay.
            hyperparameters=existing.hyperparameters if existing else None,
            validation_dataset_name=getattr(
                existing.validation_dataset if existing else None, "name", None
            ),
            is_paused=data["is_paused"],
            rules=form.rules(),
        )
        return True
    return False


def _history(existing: Schedule | None) -> list[ScheduleRun]:
    rows = ScheduleRun.objects.filter(schedule=existing).select_related("training_run")
    return list(rows.order_by("-slot")[:NUM_SLOTS]) if existing else []


def _schedule_initial(existing: Schedule | None) -> dict[str, Any]:
    if existing is None:
        return {}
    return {
        "dataset": existing.dataset.name,
        "cron": existing.cron,
        "timezone": existing.timezone,
        "is_paused": existing.is_paused,
        **rules_of(existing),
        "grace_minutes": round(existing.grace.total_seconds() / 60),
    }


def _training_context() -> dict[str, Any]:
    runs = list(
        TrainingRun.objects.select_related("adapter", "dataset", "version").order_by("-created_at")[
            :NUM_RUNS
        ]
    )
    return {
        "datasets": Dataset.objects.order_by("name"),
        "adapters": Adapter.objects.order_by("name"),
        "runs": runs,
        "runs_busy": any(run.status in TrainingRun.ACTIVE for run in runs),
        "schedules": Schedule.objects.select_related("adapter", "dataset").order_by("next_run_at"),
        "dataset_form": DatasetForm(),
        "train_form": TrainForm(),
    }


def _run_context(run_id: uuid.UUID) -> dict[str, Any]:
    found = run_services.training_run_get(run_id=run_id)
    parts = (found.hyperparameters.get("grader") or {}).get("graders") or {}
    means = ((name, found.progress.get(f"reward_{name}")) for name in parts)
    gate = GateDecision.objects.filter(version=found.version_id).first()
    return {
        "run": found,
        "gate": gate,
        "habit_rows": habit_rows(gate),
        "reward_parts": [(name, mean) for name, mean in means if mean is not None],
        "busy_states": BUSY_STATES,
        "opens_at": picking.window_opens_at(),
        "eta_ms": 1000 * (found.progress.get("eta_s") or 0),
        "events": found.events.filter(kind=TrainingEvent.Kind.MESSAGE).order_by("-pk")[:NUM_EVENTS],
        "chart": loss_chart(found.progress),
    }
