"""The pages that ask before a version, an adapter or a dataset is deleted."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.adapters.services import adapter_get, adapter_version_get
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.deletion import services
from controlplane.errors import ApiError
from controlplane.tenants.auth import Permission
from controlplane.training.datasets.services import dataset_get


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.ADAPTERS_WRITE)
def delete_version(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Ask; then delete the version."""
    version = adapter_version_get(name=name, number=number)
    return _ask(
        request,
        what=f"version {number} of {name}",
        back=reverse("console:adapter", args=[name]),
        effect="Requests that name it fail from then on; running ones finish. Its number is never "
        "used again. If it is live, the version that was live before it is live again.",
        delete=lambda is_forced: services.version_delete(version=version),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.ADAPTERS_WRITE)
def delete_adapter(request: ConsoleRequest, name: str) -> HttpResponse:
    """Ask; then delete the adapter with its versions."""
    adapter = adapter_get(name=name)
    return _ask(
        request,
        what=f"the adapter {name}",
        back=reverse("console:adapters"),
        effect="All its versions go, and the training runs that made them. Requests that name it "
        "fail from then on; running ones finish.",
        can_force=True,
        delete=lambda is_forced: services.adapter_delete(adapter=adapter, is_forced=is_forced),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.TRAINING_WRITE)
def delete_dataset(request: ConsoleRequest, name: str) -> HttpResponse:
    """Ask; then delete the dataset."""
    dataset = dataset_get(name=name)
    return _ask(
        request,
        what=f"the dataset {name}",
        back=reverse("console:training"),
        effect="Adapters that were trained on it stay, and so do the runs that have ended.",
        can_force=True,
        delete=lambda is_forced: services.dataset_delete(dataset=dataset, is_forced=is_forced),
    )


def _ask(
    request: ConsoleRequest,
    *,
    what: str,
    back: str,
    effect: str,
    delete: Callable[[bool], None],
    can_force: bool = False,
) -> HttpResponse:
    problem = ""
    if request.method == "POST":
        try:
            delete(can_force and request.POST.get("force") == "on")
        except ApiError as error:
            problem = error.message
        else:
            messages.success(request, f"{what[0].upper()}{what[1:]} is deleted.")
            return redirect(back)
    context = {
        "what": what,
        "back": back,
        "effect": effect,
        "can_force": can_force,
        "problem": problem,
    }
    return render(request, "console/delete.html", context, status=409 if problem else 200)
