"""The tenant itself: its name, and what it asks of its members."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.forms import TenantForm, add_service_error
from controlplane.errors import ApiError
from controlplane.signin.second_factor import members_without
from controlplane.tenants.auth import Permission, authorize
from controlplane.tenants.services import tenant_update


@require_http_methods(["GET", "HEAD", "POST"])
@member_page
def settings(request: ConsoleRequest) -> HttpResponse:
    tenant = request.member.tenant
    initial = {"name": tenant.name, "requires_second_factor": tenant.requires_second_factor}
    form = TenantForm(request.POST or None, initial=initial)
    if request.method == "POST":
        authorize(request.member.principal, Permission.TENANT_MANAGE)
        if form.is_valid():
            try:
                tenant_update(tenant=tenant, **form.cleaned_data)
            except ApiError as error:
                add_service_error(form, error.message, error.param)
            else:
                messages.success(request, "The settings are kept.")
                return redirect("console:settings")
    context = {"form": form, "tenant": tenant, "without": members_without()}
    status = 422 if form.errors else 200
    return render(request, "console/settings.html", context, status=status)
