"""The form for imports: a repository of the Hub, or two addresses."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from controlplane.adapters import imports
from controlplane.adapters.models import Adapter, BaseModel, is_serving
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.adapter_forms import ImportForm
from controlplane.console.forms import ErrorsShown
from controlplane.tenants.auth import Permission

_SOURCE = ("repository", "revision", "token", "config_url", "tensors_url")


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.ADAPTERS_WRITE)
def import_version(request: ConsoleRequest) -> HttpResponse:
    """Show the form; a POST begins the import, and shows the version's page."""
    form = ImportForm(request.POST or None, initial=_of(request))
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        with ErrorsShown(form):
            version = imports.adapter_version_import(
                name=data["name"],
                source=imports.import_source(**{field: data[field] for field in _SOURCE}),
                base_model_name=data["base_model"].name,
                created_by=request.user,
            )
            return redirect("console:version", version.adapter.name, version.number)
    context = {
        "form": form,
        "hub": settings.HUB_ENDPOINT,
        "base_models": BaseModel.objects.filter(is_serving()).exists(),
    }
    return render(request, "console/import.html", context, status=422 if form.errors else 200)


def _of(request: ConsoleRequest) -> dict[str, str]:
    name = request.GET.get("adapter", "")
    adapter = Adapter.objects.filter(name=name).select_related("base_model").first()
    return {"name": adapter.name, "base_model": adapter.base_model.name} if adapter else {}
