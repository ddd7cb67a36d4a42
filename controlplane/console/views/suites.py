"""Suites: made from rows, from cases, from a request or the playground."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.evaluation_forms import CaseForm, EvaluationForm, SuiteForm
from controlplane.console.forms import add_service_error
from controlplane.errors import ApiError
from controlplane.evaluations import suites
from controlplane.evaluations.models import Suite, SuiteVersion
from controlplane.tenants.auth import Permission, authorize

#: Number of cases on a page.
NUM_CASES = 50


@require_safe
@member_page
def suite(request: ConsoleRequest, name: str) -> HttpResponse:
    """Show a suite's versions and the cases of the newest one."""
    found = suites.suite_get(name=name)
    versions = list(SuiteVersion.objects.filter(suite=found).order_by("-number"))
    may_read = suites.may_read(versions[0], request.member.principal)
    cases = versions[0].cases.order_by("position")[:NUM_CASES] if may_read else []
    context = {
        "suite": found,
        "versions": versions,
        "cases": cases,
        "may_read": may_read,
        "form": EvaluationForm(initial={"suite": found.name}),
    }
    return render(request, "console/suite.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.TRAINING_WRITE)
def new_suite(request: ConsoleRequest) -> HttpResponse:
    """Make a suite, or its next version, whole."""
    form = SuiteForm(request.POST or None, initial={"name": request.GET.get("name", "")[:63]})
    if request.method == "POST" and form.is_valid():
        try:
            made = _made(request, form)
        except ApiError as error:
            add_service_error(form, _told(error), _field(error))
        else:
            messages.success(request, f"“{made}” has {made.num_cases} cases.")
            return redirect("console:suite", made.suite.name)
    context = {"form": form, "suites": Suite.objects.order_by("name")}
    return render(request, "console/new_suite.html", context, status=422 if form.errors else 200)


def _made(request: ConsoleRequest, form: SuiteForm) -> SuiteVersion:
    data = form.cleaned_data
    if data["dataset"]:
        taken = {"every": data["every"] or 1, "offset": data["offset"] or 0}
        cases = suites.cases_of_dataset(
            name=data["dataset"].name,
            by=request.member.principal,
            checks=form.wanted_checks(),
            slice=data["slice"],
            **taken,
        )
        origin = {"kind": "dataset", "dataset": data["dataset"].name, **taken}
    else:
        cases, origin = suites.Cases(form.whole_cases()), {"kind": "console"}
    return suites.suite_version_create(
        name=data["name"],
        cases=cases.fields,
        origin=origin,
        description=data["description"] or None,
        created_by=request.user,
        has_requests=cases.has_requests,
    )


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def add_case(request: ConsoleRequest) -> HttpResponse:
    """Add a case to a suite: from a request, the playground, or the form.

    Without `save` it shows the form, filled with what is given. Prompts are in no address.
    """
    if "save" not in request.POST:
        form = CaseForm(initial=_given(request))
        return _case_page(request, form)
    form = CaseForm(request.POST)
    if form.is_valid():
        try:
            made = suites.suite_case_add(
                name=form.cleaned_data["name"],
                case=form.case(),
                created_by=request.user,
                has_requests=form.cleaned_data["is_request"],
            )
        except ApiError as error:
            add_service_error(form, _told(error), _field(error))
        else:
            messages.success(request, f"“{made}” has {made.num_cases} cases.")
            return redirect("console:suite", made.suite.name)
    return _case_page(request, form, status=422)


def _given(request: ConsoleRequest) -> dict[str, Any]:
    request_id = request.POST.get("request", "")[:64]
    if not request_id:
        names = ("messages", "expected")
        return {name: request.POST.get(name, "")[: suites.MAX_CASE_BYTES] for name in names}
    authorize(request.member.principal, Permission.REQUESTS_CONTENT)
    try:
        (case,) = suites.cases_of_requests(
            request_ids=[request_id], by=request.member.principal, checks=[]
        ).fields
    except ApiError as error:
        messages.error(request, error.message)
        return {}
    text = json.dumps(case["messages"], ensure_ascii=False, indent=1)
    return {"messages": text, "expected": case["expected"], "is_request": True}


def _case_page(request: ConsoleRequest, form: CaseForm, status: int = 200) -> HttpResponse:
    context = {"form": form, "suites": Suite.objects.order_by("name")}
    return render(request, "console/add_case.html", context, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.TRAINING_WRITE)
def delete_suite(request: ConsoleRequest, name: str) -> HttpResponse:
    found, problem = suites.suite_get(name=name), ""
    if request.method == "POST":
        try:
            suites.suite_delete(suite=found)
        except ApiError as error:
            problem = error.message
        else:
            messages.success(request, f"The suite “{name}” is deleted.")
            return redirect("console:evaluations")
    context = {
        "what": f"the suite {name}",
        "back": reverse("console:suite", args=[name]),
        "effect": "Its versions and evaluations are deleted, too; decisions of a gate stay.",
        "problem": problem,
    }
    return render(request, "console/delete.html", context, status=409 if problem else 200)


def _told(error: ApiError) -> str:
    """Name the faulty case, because the form has all cases in one field."""
    param = error.param or ""
    return f"Case {param}: {error.message}" if param.startswith("cases.") else error.message


def _field(error: ApiError) -> str | None:
    param = error.param or ""
    return "cases" if param.startswith("cases") else param
