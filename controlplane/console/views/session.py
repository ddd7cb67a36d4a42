"""Choosing the tenant to act in. Signing in and out is `controlplane.console.signin`'s."""

from __future__ import annotations

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from controlplane.console.access import choose_tenant
from controlplane.errors import NotFound


@require_POST
def switch_tenant(request: HttpRequest) -> HttpResponse:
    """Not a member's page: who is in a suspended tenant must be able to leave it for another."""
    if not request.user.is_authenticated:
        return redirect(settings.LOGIN_URL)
    try:
        choose_tenant(request, request.POST.get("tenant", ""))
    except NotFound as error:
        raise Http404 from error
    return redirect("console:overview")
