"""Accept an invite: the only page of the console that makes an account."""

from __future__ import annotations

from allauth.account.adapter import get_adapter
from allauth.account.internal.flows.login import perform_password_login
from allauth.account.models import Login
from allauth.account.utils import perform_login
from django import forms
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from controlplane.console.forms import PasswordForm, add_service_error
from controlplane.console.signin.guessing import remember_browser
from controlplane.errors import Conflict, InvalidRequest, NotFound
from controlplane.tenants import people
from controlplane.tenants.auth import SESSION_TENANT_KEY
from controlplane.tenants.models import Invite, Membership, User
from controlplane.tenants.services import password_check, user_create


@sensitive_post_parameters("password")
@require_http_methods(["GET", "HEAD", "POST"])
def invite(request: HttpRequest, token: str) -> HttpResponse:
    """Show an invite, or accept it. A GET changes nothing, because mail scanners open links, too.

    The inviter can also open the page and must not learn whether the address has an account: the
    page looks the same in both cases, and asks for a password in the same words. Only an accepted
    password, which uses the invite, shows that there was no account.
    """
    try:
        found, tenant = people.invite_find(token=token)
        form = PasswordForm(request.POST or None)
        step = _step(request, found)
        if request.method == "POST":
            answer = _accept(request, token, found, step, form)
            if answer is not None:
                return answer
    except (NotFound, Conflict) as error:
        return render(
            request, "console/invite.html", {"problem": error.message}, status=error.status
        )
    context = {"invite": found, "tenant": tenant, "form": form, "step": step}
    status = 422 if form.errors else 200
    return render(request, "console/invite.html", context, status=status)


def _step(request: HttpRequest, found: Invite) -> str:
    """Return what the person has to do: accept, sign_out or join."""
    if isinstance(request.user, User):
        return "accept" if request.user.email == found.email else "sign_out"
    return "join"


def _accept(
    request: HttpRequest, token: str, found: Invite, step: str, form: PasswordForm
) -> HttpResponse | None:
    """Accept the invite. -> the redirect, or None when the form has an error."""
    if step == "accept":
        assert isinstance(request.user, User)
        return _enter(request, people.invite_accept(token=token, user=request.user))
    if step != "join" or not form.is_valid():
        return None
    password = form.cleaned_data["password"]
    try:
        # First, in both cases: an error about a weak password must not disclose an account.
        password_check(password, User(email=found.email))
        if User.objects.filter(email=found.email).exists():
            return _sign_in(request, found, password)
        with transaction.atomic():
            user = user_create(email=found.email, password=password)
            membership = people.invite_accept(token=token, user=user)
    except InvalidRequest as error:
        add_service_error(form, error.message, error.param)
        return None
    except forms.ValidationError as error:
        form.add_error("password", error)
        return None
    perform_login(request, user)
    answer = _enter(request, membership)
    remember_browser(request, answer, user)
    return answer


def _sign_in(request: HttpRequest, found: Invite, password: str) -> HttpResponse:
    """Sign in, and return to this page. Raises ValidationError for a wrong password."""
    adapter = get_adapter(request)
    credentials = {"email": found.email, "password": password}
    user = adapter.authenticate(request, **credentials)
    if user is None:
        raise adapter.validation_error("email_password_mismatch")
    login = Login(user=user, email=found.email, redirect_url=request.path)
    answer: HttpResponse = perform_password_login(request, credentials, login)
    return answer


def _enter(request: HttpRequest, membership: Membership) -> HttpResponse:
    request.session[SESSION_TENANT_KEY] = str(membership.tenant_id)
    return redirect("console:overview")
