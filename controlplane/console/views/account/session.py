"""Switch the tenant. `controlplane.console.signin` signs people in and out."""

from __future__ import annotations

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from controlplane.console.access import choose_tenant
from controlplane.errors import NotFound


@require_POST
def switch_tenant(request: HttpRequest) -> HttpResponse:
    """Switch the tenant. No `member_page`: people must be able to leave a suspended tenant."""
    if not request.user.is_authenticated:
        return redirect(settings.LOGIN_URL)
    try:
        choose_tenant(request, request.POST.get("tenant", ""))
    except NotFound as error:
        raise Http404 from error
    return redirect("console:overview")
