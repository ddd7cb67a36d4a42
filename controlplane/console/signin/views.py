"""Views that replace allauth's: sign-out, and the redirect to the issuer and back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from allauth.account import views as account
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe
from requests import RequestException

from controlplane.console.signin.provider import OidcAdapter

logger = logging.getLogger(__name__)

sign_out = require_POST(account.logout)


@require_POST
def oidc_login(request: HttpRequest) -> HttpResponse:
    """Send the person to the issuer.

    By a page, because the content security policy forbids a form's redirect to another site.
    """
    answer = _ask(OAuth2LoginView.adapter_view, request)
    if answer.status_code == 302:
        context = {"url": answer.headers["Location"], "issuer": settings.OIDC_NAME}
        return render(request, "signin/leaving.html", context)
    return answer


@require_safe
def oidc_callback(request: HttpRequest) -> HttpResponse:
    return _ask(OAuth2CallbackView.adapter_view, request)


def _ask(
    view: Callable[[OidcAdapter], Callable[..., HttpResponse]], request: HttpRequest
) -> HttpResponse:
    if not settings.OIDC_ISSUER:
        raise Http404
    try:
        return view(OidcAdapter(request, settings.OIDC_ISSUER))(request)
    except (RequestException, KeyError, ValueError):
        # It is down, or its answers violate the standard.
        logger.exception("the issuer %s failed", settings.OIDC_ISSUER)
        return render(request, "signin/no_issuer.html", {"issuer": settings.OIDC_NAME}, status=502)
