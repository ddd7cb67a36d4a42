"""Suites and evaluations, and the differences between two of them."""

from __future__ import annotations

import uuid

from django.contrib import messages
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.evaluation_forms import EvaluationForm
from controlplane.console.evaluation_rows import comparison_rows
from controlplane.console.forms import ErrorsShown
from controlplane.errors import ApiError
from controlplane.evaluations.comparison import evaluations_compare
from controlplane.evaluations.models import Evaluation, Suite
from controlplane.evaluations.services import (
    evaluation_cancel,
    evaluation_create,
    evaluation_get,
)
from controlplane.evaluations.suites import suite_version_get
from controlplane.tenants.auth import Permission

_NUM_EVALUATIONS = 50


@require_safe
@member_page
def evaluations(request: ConsoleRequest) -> HttpResponse:
    """Show the suites and the newest evaluations, with a form to compare two of them."""
    return _page(request, EvaluationForm(initial={"model": request.GET.get("model", "")[:200]}))


def _page(request: ConsoleRequest, form: EvaluationForm, status: int = 200) -> HttpResponse:
    rows = Evaluation.objects.select_related("suite_version__suite").order_by("-created_at")
    context = {
        "suites": Suite.objects.prefetch_related("versions").order_by("name"),
        "evaluations": rows[:_NUM_EVALUATIONS],
        "active": Evaluation.ACTIVE,
        "form": form,
    }
    return render(request, "console/evaluations.html", context, status=status)


@require_POST
@member_page(permission=Permission.INFER)
def run_suite(request: ConsoleRequest) -> HttpResponse:
    form = EvaluationForm(request.POST)
    if form.is_valid():
        data = form.cleaned_data
        with ErrorsShown(form):
            evaluation_create(
                principal=request.member.principal,
                model=data["model"],
                suite_version=suite_version_get(suite=data["suite"]),
                max_tokens=data["max_tokens"],
                created_by=request.user,
            )
            messages.success(request, "The suite runs, after interactive requests.")
            return redirect("console:evaluations")
    return _page(request, form, status=422)


@require_POST
@member_page(permission=Permission.INFER)
def cancel(request: ConsoleRequest, evaluation_id: uuid.UUID) -> HttpResponse:
    with ErrorsShown(request):
        evaluation_cancel(evaluation=evaluation_get(evaluation_id=evaluation_id))
    return redirect("console:evaluations")


@require_safe
@member_page
def comparison(request: ConsoleRequest) -> HttpResponse:
    """Show the differences between two evaluations."""
    try:
        ids = [uuid.UUID(request.GET.get(name, "")) for name in ("before", "after")]
    except ValueError:
        raise Http404 from None
    try:
        before, after = (evaluation_get(evaluation_id=each) for each in ids)
        compared = evaluations_compare(before, after, by=request.member.principal)
    except ApiError as error:
        messages.error(request, error.message)
        return redirect("console:evaluations")
    context = {"compared": compared, "rows": comparison_rows(compared)}
    return render(request, "console/comparison.html", context)
