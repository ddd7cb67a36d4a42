"""The person's own password, second factors, passkeys and sessions."""

from __future__ import annotations

from allauth.account.internal.flows.email_verification import send_verification_email_to_address
from allauth.account.internal.flows.manage_email import sync_user_email_address
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.console.access import AccountRequest, account_page, tenants_of
from controlplane.tenants.second_factor import is_kept_out


@require_safe
@account_page
def security(request: AccountRequest) -> HttpResponse:
    factors = list(Authenticator.objects.filter(user=request.user).order_by("pk"))
    codes = next((f for f in factors if f.type == Authenticator.Type.RECOVERY_CODES), None)
    sessions = UserSession.objects.purge_and_list(request.user)
    context = {
        "app": next((f for f in factors if f.type == Authenticator.Type.TOTP), None),
        "passkeys": [f for f in factors if f.type == Authenticator.Type.WEBAUTHN],
        "num_codes": len(codes.wrap().get_unused_codes()) if codes else None,
        "is_verified": EmailAddress.objects.filter(
            user=request.user, email=request.user.email, verified=True
        ).exists(),
        "sessions": sorted(sessions, key=lambda session: session.created_at, reverse=True),
        "is_linked": SocialAccount.objects.filter(user=request.user).exists(),
        "issuer": settings.OIDC_NAME,
        "is_kept_out": request.user.is_staff and is_kept_out(request.user),
        "tenants": tenants_of(request.user) if request.second_factor_for else (),
    }
    return render(request, "console/security.html", context)


@require_POST
@account_page
def verify_email(request: AccountRequest) -> HttpResponse:
    """Send the mail that verifies the person's address."""
    sync_user_email_address(request.user)
    address = EmailAddress.objects.get(user=request.user, email=request.user.email)
    if not address.verified:
        send_verification_email_to_address(request, address)
    return redirect("console:security")
