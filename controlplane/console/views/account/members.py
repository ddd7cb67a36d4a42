"""The tenant's members and invites."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.console.access import ConsoleRequest, Member, member_page
from controlplane.console.forms import ErrorsShown, InviteForm, RoleForm
from controlplane.tenants import people
from controlplane.tenants.auth import Permission
from controlplane.tenants.invite_mail import invite_send, invite_url
from controlplane.tenants.models import Invite, Membership, Role

#: Number of shown invites that are no longer pending.
NUM_OLD_INVITES = 20


@require_safe
@member_page
def members(request: ConsoleRequest) -> HttpResponse:
    return render(request, "console/members.html", _context(request.member))


@require_POST
@member_page(permission=Permission.MEMBERS_MANAGE)
def set_role(request: ConsoleRequest, member_id: uuid.UUID) -> HttpResponse:
    form = RoleForm(request.POST, roles=list(Role))
    if form.is_valid():
        with ErrorsShown(request):
            found = people.member_role_set(
                by=request.member.principal,
                member_id=member_id,
                role=Role(form.cleaned_data["role"]),
            )
            messages.success(request, f"{found.user.email} is now {found.role}.")
    return redirect("console:members")


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.MEMBERS_MANAGE)
def remove(request: ConsoleRequest, member_id: uuid.UUID) -> HttpResponse:
    """Ask; then remove the member and revoke their keys."""
    found = people.member_get(member_id=member_id)
    if request.method == "POST":
        with ErrorsShown(request):
            people.member_remove(by=request.member.principal, member_id=member_id)
            messages.success(request, f"{found.user.email} is no longer a member.")
        return redirect("console:members")
    context = {"found": found, "num_keys": found.keys.filter(revoked_at=None).count()}
    return render(request, "console/remove_member.html", context)


@require_POST
@member_page(permission=Permission.MEMBERS_MANAGE)
def create_invite(request: ConsoleRequest) -> HttpResponse:
    """Make an invite, send it by mail, and show its address, only this time."""
    form = InviteForm(request.POST, roles=request.member.grantable_roles)
    context = _context(request.member) | {"form": form}
    if form.is_valid():
        with ErrorsShown(form):
            made, token = people.invite_create(
                by=request.member.principal,
                email=form.cleaned_data["email"],
                role=Role(form.cleaned_data["role"]),
            )
            was_sent = invite_send(invite=made, tenant=request.member.tenant, token=token)
            context = _context(request.member) | {
                "new_invite": made,
                "new_url": invite_url(token),
                "was_sent": was_sent,
            }
    template = "console/_invites.html" if request.htmx else "console/members.html"
    status = 422 if form.errors and not request.htmx else 200
    return render(request, template, context, status=status)


@require_POST
@member_page(permission=Permission.MEMBERS_MANAGE)
def revoke_invite(request: ConsoleRequest, invite_id: uuid.UUID) -> HttpResponse:
    with ErrorsShown(request):
        found = people.invite_revoke(invite_id=invite_id)
        messages.success(request, f"The invite of {found.email} is revoked.")
    return redirect("console:members")


def _context(member: Member) -> dict[str, Any]:
    invites = list(Invite.objects.select_related("invited_by").order_by("-created_at")[:1000])
    pending = [invite for invite in invites if invite.status == Invite.Status.PENDING]
    old = [invite for invite in invites if invite.status != Invite.Status.PENDING]
    grantable = member.grantable_roles
    rows = [
        {
            "found": found,
            "is_me": found.user_id == member.user.pk,
            "may_change": member.can_manage_members and Role(found.role) in grantable,
        }
        for found in Membership.objects.select_related("user").order_by("created_at")
    ]
    return {
        "rows": rows,
        "roles": grantable,
        "invites": pending + old[:NUM_OLD_INVITES],
        "form": InviteForm(roles=grantable),
    }
