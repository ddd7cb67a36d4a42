"""Signing in and out, and choosing the tenant to act in."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth import login, logout
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.console import throttle
from controlplane.console.access import choose_tenant, public_page
from controlplane.console.forms import SignInForm
from controlplane.errors import NotFound
from controlplane.tenants.services import authenticate_user


@sensitive_post_parameters("password")
@require_http_methods(["GET", "HEAD", "POST"])
@public_page
def sign_in(request: HttpRequest) -> HttpResponse:
    """One answer for an unknown address, a wrong password and a closed account."""
    if request.user.is_authenticated:
        return redirect(_target(request))
    form = SignInForm(request.POST or None)
    status = 200
    if request.method == "POST":
        status = 422
        if form.is_valid():
            status = _attempt(request, form)
            if status == 302:
                return redirect(_target(request))
    context = {"form": form, "next": request.POST.get("next") or request.GET.get("next", "")}
    response = render(request, "console/sign_in.html", context, status=status)
    if status == 429:
        response.headers["Retry-After"] = str(throttle.WINDOW_S)
    return response


def _attempt(request: HttpRequest, form: SignInForm) -> int:
    """Sign in, or say in the form why not; the status of the answer."""
    email, password = form.cleaned_data["email"], form.cleaned_data["password"]
    address = request.META.get("REMOTE_ADDR", "")
    if throttle.is_blocked(address, email):
        form.add_error(None, "Too many attempts. Wait a quarter of an hour and try again.")
        return 429
    user = authenticate_user(request=request, email=email, password=password)
    if user is None:
        throttle.count_failure(address, email)
        form.add_error(None, "This e-mail address and password do not match.")
        return 422
    throttle.forget_failures(address, email)
    login(request, user)
    return 302


@require_POST
@public_page
def sign_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return redirect(settings.LOGOUT_REDIRECT_URL)


@require_POST
@public_page
def switch_tenant(request: HttpRequest) -> HttpResponse:
    """Not a member's page: who is in a suspended tenant must be able to leave it for another."""
    if not request.user.is_authenticated:
        return redirect(settings.LOGIN_URL)
    try:
        choose_tenant(request, request.POST.get("tenant", ""))
    except NotFound as error:
        raise Http404 from error
    return redirect("console:overview")


def _target(request: HttpRequest) -> str:
    """Where the person wanted to go, unless that is another site."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    if url_has_allowed_host_and_scheme(
        target, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        return target
    return str(settings.LOGIN_REDIRECT_URL)
