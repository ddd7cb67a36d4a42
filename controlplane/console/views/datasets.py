"""A dataset's versions, and where its rows are pulled from."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.forms import ErrorsShown
from controlplane.tenants.auth import Permission
from controlplane.training.datasets import services as dataset_services
from controlplane.training.datasets import sources, versions
from controlplane.training.models import Dataset, DatasetSource

#: Versions and pulls that a dataset's page shows, the newest.
NUM_SHOWN = 20


def history_of(dataset: Dataset) -> dict[str, Any]:
    """Return the versions and the source that a dataset's page shows."""
    source = DatasetSource.objects.filter(name=dataset.name).first()
    return {
        "versions": dataset.versions.order_by("-number")[:NUM_SHOWN],
        "source": source,
        "is_pulling": source is not None and sources.is_pulling(source=source),
        "pulls": source.pulls.order_by("-created_at")[:NUM_SHOWN] if source else [],
    }


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def restore_dataset(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    with ErrorsShown(request):
        dataset = dataset_services.dataset_get(name=name)
        now = versions.version_restore(dataset=dataset, number=number)
        messages.success(request, f"Version {now.version} has the rows of version {number}.")
    return redirect("console:dataset", name)


@require_POST
@member_page(permission=Permission.TRAINING_WRITE)
def pull_dataset(request: ConsoleRequest, name: str) -> HttpResponse:
    sources.pull_request(source=sources.source_get(name=name))
    messages.success(request, "The pull begins within seconds.")
    return redirect("console:dataset", name)
