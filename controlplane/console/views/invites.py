"""Accepting an invite: the one page of the console that makes an account."""

from __future__ import annotations

from allauth.account.utils import perform_login
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from controlplane.console.forms import PasswordForm, add_service_error
from controlplane.errors import Conflict, InvalidRequest, NotFound
from controlplane.tenants import people
from controlplane.tenants.auth import SESSION_TENANT_KEY
from controlplane.tenants.models import Invite, Membership, User
from controlplane.tenants.services import user_create


@sensitive_post_parameters("password")
@require_http_methods(["GET", "HEAD", "POST"])
def invite(request: HttpRequest, token: str) -> HttpResponse:
    """Opening it changes nothing, for mail scanners open addresses too; the button accepts."""
    try:
        found, tenant = people.invite_find(token=token)
        form = PasswordForm(request.POST or None)
        step = _step(request, found)
        if request.method == "POST":
            membership = _accept(request, token, found, step, form)
            if membership is not None:
                request.session[SESSION_TENANT_KEY] = str(membership.tenant_id)
                return redirect("console:overview")
    except (NotFound, Conflict) as error:
        return render(
            request, "console/invite.html", {"problem": error.message}, status=error.status
        )
    context = {"invite": found, "tenant": tenant, "form": form, "step": step}
    status = 422 if form.errors else 200
    return render(request, "console/invite.html", context, status=status)


def _step(request: HttpRequest, found: Invite) -> str:
    """What the person has to do: accept, sign_out, sign_in or join."""
    if isinstance(request.user, User):
        return "accept" if request.user.email == found.email else "sign_out"
    return "sign_in" if User.objects.filter(email=found.email).exists() else "join"


def _accept(
    request: HttpRequest, token: str, found: Invite, step: str, form: PasswordForm
) -> Membership | None:
    """The new membership; None when the page has to be shown again."""
    if step == "accept":
        assert isinstance(request.user, User)
        return people.invite_accept(token=token, user=request.user)
    if step != "join" or not form.is_valid():
        return None
    try:
        with transaction.atomic():
            user = user_create(email=found.email, password=form.cleaned_data["password"])
            membership = people.invite_accept(token=token, user=user)
    except InvalidRequest as error:
        add_service_error(form, error.message, error.param)
        return None
    perform_login(request, user)
    return membership
