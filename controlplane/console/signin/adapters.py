"""Hooks that allauth calls: who may sign in, how secrets are stored, which links mails have."""

from __future__ import annotations

import logging
from smtplib import SMTPException
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.providers.base.constants import AuthProcess
from cryptography.fernet import MultiFernet
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from controlplane.console.signin import guessing
from controlplane.infra.ciphers import peppered_cipher
from controlplane.tenants.models import User

logger = logging.getLogger(__name__)

#: The purpose of the cipher of second factors' secrets.
SECOND_FACTORS = b"second factors"


class AccountAdapter(DefaultAccountAdapter):
    """Allauth's rules for accounts: only operators and invites make them, never a public form."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        # The same answer for an unknown address, a wrong password and a closed account.
        "email_password_mismatch": "This e-mail address and password do not match.",
        "too_many_login_attempts": "Too many attempts. Wait a few minutes and try again.",
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def get_client_ip(self, request: HttpRequest) -> str:
        """Return the peer's address, which uvicorn takes from a trusted proxy's header."""
        return request.META.get("REMOTE_ADDR") or "0.0.0.0"

    def pre_authenticate(self, request: HttpRequest, **credentials: Any) -> None:
        """Refuse an attempt after too many; after a success allauth rolls its count back."""
        self._login_failed_rl_usage = guessing.try_consume(request, credentials.get("email") or "")
        if not self._login_failed_rl_usage:
            raise self.validation_error("too_many_login_attempts")

    def _delete_login_attempts_cached_email(self, request: HttpRequest, **credentials: Any) -> None:
        """Reset the counts of attempts; allauth calls this after a password reset."""
        guessing.forget(request, credentials.get("email") or "")

    def post_login(self, request: HttpRequest, user: Any, **kwargs: Any) -> HttpResponse:
        response: HttpResponse = super().post_login(request, user, **kwargs)
        guessing.remember_browser(request, response, user)
        return response

    def get_email_confirmation_url(self, request: HttpRequest, emailconfirmation: Any) -> str:
        path = reverse("account_confirm_email", args=[emailconfirmation.key])
        return settings.BASE_URL + path

    def get_reset_password_from_key_url(self, key: str) -> str:
        uid, _, token = key.partition("-")
        path = reverse("account_reset_password_from_key", kwargs={"uidb36": uid, "key": token})
        return settings.BASE_URL + path

    def get_password_change_redirect_url(self, request: HttpRequest) -> str:
        return reverse("console:security")

    def get_email_verification_redirect_url(self, email_address: Any) -> str:
        return reverse("console:security")

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Send a mail; if that fails, log it. The page answers as if the mail was sent."""
        try:
            super().send_mail(template_prefix, email, {**context, "base_url": settings.BASE_URL})
        except (SMTPException, OSError):
            logger.exception("a mail could not be sent: %s", template_prefix)

    def add_message(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        """Show no messages about signing in and out."""
        template = kwargs.get("message_template") or (args[1] if len(args) > 1 else "")
        if template not in ("account/messages/logged_in.txt", "account/messages/logged_out.txt"):
            super().add_message(request, *args, **kwargs)


class MfaAdapter(DefaultMFAAdapter):
    """Encryption of second factors' secrets, so that the database alone discloses nothing."""

    def encrypt(self, text: str) -> str:
        return _cipher().encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return _cipher().decrypt(encrypted_text.encode()).decode()

    def get_totp_issuer(self) -> str:
        return "Lorikeet"

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        return {**super().get_public_key_credential_rp_entity(), "name": "Lorikeet"}


class SocialAdapter(DefaultSocialAccountAdapter):
    """Allauth's rules for an issuer: it identifies people, it does not make accounts."""

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        return False

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Refuse people without an account here, before any form.

        Nobody can link an issuer's account by hand: the link would outlive a stolen password.
        """
        is_linking = sociallogin.state.get("process") == AuthProcess.CONNECT
        if sociallogin.is_existing and not is_linking:
            return
        context = {"emails": [address.email for address in sociallogin.email_addresses]}
        response = render(request, "signin/nobody.html", context, status=403)
        raise ImmediateHttpResponse(response)

    def authenticate_by_email(self, sociallogin: Any) -> tuple[User, str] | None:
        """Return the person whose address the issuer has verified; see `provider`."""
        for address in sociallogin.email_addresses:
            if address.verified:
                user = User.objects.filter(email=address.email.lower(), is_active=True).first()
                if user is not None:
                    return user, address.email
        return None


def _cipher() -> MultiFernet:
    return peppered_cipher(SECOND_FACTORS)
