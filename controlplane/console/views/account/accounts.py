"""Service accounts: their keys outlive the people who made them."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import messages
from django.db.models import Count, Q
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.console.access import ConsoleRequest, Member, member_page
from controlplane.console.forms import ErrorsShown, ServiceAccountForm
from controlplane.tenants import people
from controlplane.tenants.auth import Permission
from controlplane.tenants.models import Role, ServiceAccount


@require_safe
@member_page
def accounts(request: ConsoleRequest) -> HttpResponse:
    return render(request, "console/accounts.html", _context(request.member))


@require_POST
@member_page(permission=Permission.MEMBERS_MANAGE)
def create_account(request: ConsoleRequest) -> HttpResponse:
    form = ServiceAccountForm(request.POST, roles=request.member.grantable_roles)
    if form.is_valid():
        with ErrorsShown(form):
            made = people.service_account_create(
                by=request.member.principal,
                name=form.cleaned_data["name"],
                role=Role(form.cleaned_data["role"]),
                description=form.cleaned_data["description"],
            )
            messages.success(request, f"“{made.name}” is made. Create its key under API keys.")
            return redirect("console:accounts")
    context = _context(request.member) | {"form": form}
    return render(request, "console/accounts.html", context, status=422)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.MEMBERS_MANAGE)
def account(request: ConsoleRequest, account_id: uuid.UUID) -> HttpResponse:
    """Change the description, or the role, which restricts all its keys."""
    found = people.service_account_get(account_id=account_id)
    initial = {"name": found.name, "role": found.role, "description": found.description}
    roles = request.member.grantable_roles
    form = ServiceAccountForm(request.POST or None, initial=initial, roles=roles, is_new=False)
    if request.method == "POST" and form.is_valid():
        with ErrorsShown(form):
            people.service_account_update(
                by=request.member.principal,
                account_id=account_id,
                role=Role(form.cleaned_data["role"]),
                description=form.cleaned_data["description"],
            )
            messages.success(request, f"“{found.name}” is changed.")
            return redirect("console:accounts")
    context = {"account": found, "form": form, "keys": found.keys.filter(revoked_at=None)}
    status = 422 if form.errors else 200
    return render(request, "console/account.html", context, status=status)


@require_POST
@member_page(permission=Permission.MEMBERS_MANAGE)
def delete_account(request: ConsoleRequest, account_id: uuid.UUID) -> HttpResponse:
    """Delete a service account and revoke its keys."""
    found = people.service_account_get(account_id=account_id)
    with ErrorsShown(request):
        people.service_account_delete(by=request.member.principal, account_id=account_id)
        messages.success(request, f"“{found.name}” is deleted, and its keys are revoked.")
    return redirect("console:accounts")


def _context(member: Member) -> dict[str, Any]:
    working = Count("keys", filter=Q(keys__revoked_at=None))
    return {
        "accounts": ServiceAccount.objects.annotate(num_keys=working).order_by("name"),
        "form": ServiceAccountForm(roles=member.grantable_roles, initial={"role": Role.DEVELOPER}),
    }
