"""API keys: list, create, change, rotate and revoke them."""

from __future__ import annotations

import dataclasses
import datetime as dt

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.console.access import ConsoleRequest, Member, member_page
from controlplane.console.forms import (
    ErrorsShown,
    KeyEditForm,
    KeyForm,
    RotateForm,
)
from controlplane.tenants.auth import Permission
from controlplane.tenants.key_grants import check_holds
from controlplane.tenants.key_services import (
    api_key_create,
    api_key_get,
    api_key_revoke,
    api_key_rotate,
    api_key_update,
)
from controlplane.tenants.models import ApiKey


@require_safe
@member_page
def keys(request: ConsoleRequest) -> HttpResponse:
    return render(request, "console/keys.html", _context(request.member))


@require_http_methods(["POST"])
@member_page(permission=Permission.KEYS_MANAGE)
def create_key(request: ConsoleRequest) -> HttpResponse:
    """Create a key and show its text, which is neither stored nor shown again.

    The page calls this by htmx, so a reload of the page does not make a second key.
    """
    form = KeyForm(request.POST, member=request.member)
    key, text = None, ""
    if form.is_valid():
        with ErrorsShown(form):
            key, text = api_key_create(
                name=form.cleaned_data["name"],
                by=request.member.principal,
                owner=form.cleaned_data["owner"] or request.member.membership,
                expires_at=form.expires_at(),
                environment=form.cleaned_data["environment"],
                rules=form.rules(),
            )
    context = _context(request.member, None if key else form)
    context |= {"new_key": key, "new_key_text": text}
    template = "console/_keys.html" if request.htmx else "console/keys.html"
    # htmx shows only answers of 2xx.
    status = 422 if form.errors and not request.htmx else 200
    return render(request, template, context, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.KEYS_MANAGE)
def edit_key(request: ConsoleRequest, public_id: str) -> HttpResponse:
    """Change a key's rules; its secret stays. The key must not have more scopes than they."""
    key = api_key_get(public_id=public_id)
    principal = request.member.principal
    check_holds(principal, key)
    initial = {
        "name": key.name,
        "scopes": key.scopes,
        "allowed_models": key.allowed_models,
        "allowed_ips": key.allowed_ips,
        "expires_at": key.expires_at,
    }
    form = KeyEditForm(request.POST or None, initial=initial, member=request.member)
    if request.method == "POST" and form.is_valid():
        wanted = form.cleaned_data["expires_at"]
        changes = {
            "name": form.cleaned_data["name"],
            "expires_at": _same_minute(wanted, key.expires_at),
            **dataclasses.asdict(form.rules()),
        }
        with ErrorsShown(form):
            api_key_update(public_id=public_id, changes=changes, by=principal)
            messages.success(request, f"The key “{key.name}” is changed.")
            return redirect("console:keys")
    status = 422 if form.errors else 200
    return render(request, "console/edit_key.html", {"key": key, "form": form}, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.KEYS_MANAGE)
def revoke_key(request: ConsoleRequest, public_id: str) -> HttpResponse:
    """Ask, also about the keys that it made; then revoke the key."""
    key = api_key_get(public_id=public_id)
    made = ApiKey.made_by(key.pk).filter(revoked_at=None).order_by("created_at")
    if request.method == "POST":
        has_asked = "asked" in request.POST
        with_children = "children" in request.POST or not has_asked
        api_key_revoke(public_id=public_id, with_children=with_children)
        messages.success(request, f"The key “{key.name}” is revoked.")
        return redirect("console:keys")
    return render(request, "console/revoke_key.html", {"key": key, "made": made})


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.KEYS_MANAGE)
def rotate_key(request: ConsoleRequest, public_id: str) -> HttpResponse:
    """Ask; then make a new secret and show it, only this time."""
    key = api_key_get(public_id=public_id)
    check_holds(request.member.principal, key)
    form = RotateForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        key, text = api_key_rotate(
            public_id=public_id, grace_s=form.grace_s(), by=request.member.principal
        )
        context = _context(request.member) | {"new_key": key, "new_key_text": text}
        return render(request, "console/keys.html", context)
    status = 422 if form.errors else 200
    return render(request, "console/rotate_key.html", {"key": key, "form": form}, status=status)


def _same_minute(wanted: dt.datetime | None, present: dt.datetime | None) -> dt.datetime | None:
    """Return `present` if the minute is the same: the field has no seconds."""
    if wanted and present and wanted == present.replace(second=0, microsecond=0):
        return present
    return wanted


def _context(member: Member, form: KeyForm | None = None) -> dict[str, object]:
    now = timezone.now()
    found = ApiKey.objects.select_related("created_by", "parent", "service_account", "owner__user")
    rows = [
        {
            "key": key,
            "state": _state(key, now),
            "grace": key.old_secret_until if (key.old_secret_until or now) > now else None,
            "may_change": member.can_manage_keys
            and set(key.scopes) <= member.principal.permissions,
        }
        for key in found.order_by("-created_at")
    ]
    # Active keys first; the sort is stable, so each half stays newest first.
    rows.sort(key=lambda row: row["state"] != "active")
    return {"form": form or KeyForm(member=member), "rows": rows}


def _state(key: ApiKey, now: dt.datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    return "active"
