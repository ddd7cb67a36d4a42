"""The tenant's settings: its name, members' second factors, request log, captured requests."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.evaluation_forms import CaptureForm
from controlplane.console.forms import ErrorsShown, LogPolicyForm, TenantForm, add_service_error
from controlplane.errors import ApiError
from controlplane.requestlog import capture, services
from controlplane.requestlog.models import LogPolicy
from controlplane.tenants.auth import Permission, authorize
from controlplane.tenants.models import Tenant
from controlplane.tenants.second_factor import members_without
from controlplane.tenants.services import tenant_update


@require_http_methods(["GET", "HEAD", "POST"])
@member_page
def settings(request: ConsoleRequest) -> HttpResponse:
    tenant = request.member.tenant
    form = TenantForm(request.POST or None, initial=_initial(tenant))
    if request.method == "POST":
        authorize(request.member.principal, Permission.TENANT_MANAGE)
        if form.is_valid():
            with ErrorsShown(form):
                tenant_update(tenant=tenant, **form.cleaned_data)
                messages.success(request, "The settings are saved.")
                return redirect("console:settings")
    return _page(request, form=form)


@require_POST
@member_page(permission=Permission.TENANT_MANAGE)
def set_log_policy(request: ConsoleRequest) -> HttpResponse:
    form = LogPolicyForm(request.POST)
    if form.is_valid():
        with ErrorsShown(form):
            services.log_policy_set(**form.cleaned_data)
            messages.success(request, "Saved. This takes effect within seconds.")
            return redirect("console:settings")
    return _page(request, log_form=form)


@require_POST
@member_page(permission=Permission.TENANT_MANAGE)
def set_capture(request: ConsoleRequest) -> HttpResponse:
    form = CaptureForm(request.POST)
    if form.is_valid():
        data = form.cleaned_data
        max_bytes = data.pop("max_mib") << 20
        try:
            capture.capture_policy_set(**data, max_bytes=max_bytes)
        except ApiError as error:
            param = "shares" if (error.param or "").startswith("shares") else error.param
            add_service_error(form, error.message, param)
        else:
            messages.success(request, "Saved. This takes effect within seconds.")
            return redirect("console:settings")
    return _page(request, capture_form=form)


def _page(
    request: ConsoleRequest,
    *,
    form: TenantForm | None = None,
    log_form: LogPolicyForm | None = None,
    capture_form: CaptureForm | None = None,
) -> HttpResponse:
    """Render the page with the submitted forms; the others show the current values."""
    tenant, policy = request.member.tenant, services.log_policy()
    kept = capture.capture_policy()
    context = {
        "form": form or TenantForm(initial=_initial(tenant)),
        "log_form": log_form or LogPolicyForm(initial=_kept(policy)),
        "policy": policy,
        "capture": kept,
        "capture_form": capture_form or CaptureForm(initial=CaptureForm.initial_of(kept)),
        "tenant": tenant,
        "without": members_without(),
    }
    errors = any(sent.errors for sent in (form, log_form, capture_form) if sent is not None)
    return render(request, "console/settings.html", context, status=422 if errors else 200)


def _initial(tenant: Tenant) -> dict[str, object]:
    return {name: getattr(tenant, name) for name in TenantForm.base_fields}


def _kept(policy: LogPolicy) -> dict[str, object]:
    return {name: getattr(policy, name) for name in LogPolicyForm.base_fields}
