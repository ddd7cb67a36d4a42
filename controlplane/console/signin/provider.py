"""An OpenID Connect issuer, set in the environment; allauth finds it by this module's name.

allauth does not check the signature of an ID token from the token endpoint, sends no nonce, and
accepts any truthy `email_verified`. This module checks the signature, a nonce, and for `true`.
"""

from __future__ import annotations

import secrets
from typing import Any

import jwt
from allauth.account.models import EmailAddress
from allauth.socialaccount.adapter import get_adapter
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.openid_connect.provider import OpenIDConnectProvider
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

_NONCE_KEY = "oidc_nonce"
#: Signatures that only the issuer can make: no shared secrets, which others know, and not "none".
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
_REQUIRED = ["iss", "sub", "aud", "exp", "iat"]
_CLOCK_SKEW_S = 60
#: The claims of an ID token that are stored.
_KEPT = ("sub", "email", "email_verified", "name")


class OidcAdapter(OpenIDConnectOAuth2Adapter):
    """The authorization code flow with the issuer."""

    def get_callback_url(self, request: HttpRequest, app: Any) -> str:
        """Return the URL registered with the issuer, whatever the request's host is."""
        return settings.BASE_URL + reverse("oidc_callback")

    def complete_login(self, request: HttpRequest, app: Any, token: Any, **kwargs: Any) -> Any:
        """Verify the ID token. Raises OAuth2Error if it is missing, forged, expired or not ours."""
        claims = self._verified(kwargs["response"].get("id_token") or "", app.client_id)
        nonce = request.session.pop(_NONCE_KEY, None)
        if nonce is None or claims.get("nonce") != nonce:
            raise OAuth2Error("the ID token belongs to another sign-in")
        if "email" not in claims and "userinfo_endpoint" in self.openid_config:
            userinfo = self._fetch_user_info(token.token)
            if userinfo.get("sub") != claims["sub"]:
                raise OAuth2Error("the user info belongs to another person")
            claims = {**userinfo, **claims}
        return self.get_provider().sociallogin_from_response(request, {"id_token": claims})

    def _verified(self, id_token: str, client_id: str) -> dict[str, Any]:
        with get_adapter().get_requests_session() as session:
            answer = session.get(self.openid_config["jwks_uri"])
            answer.raise_for_status()
        try:
            claims: dict[str, Any] = jwt.decode(
                id_token,
                _key_of(id_token, jwt.PyJWKSet.from_dict(answer.json())),
                algorithms=_ALGORITHMS,
                audience=client_id,
                issuer=settings.OIDC_ISSUER,
                leeway=_CLOCK_SKEW_S,
                options={"require": _REQUIRED},
            )
        except jwt.PyJWTError as error:
            raise OAuth2Error(f"the ID token is invalid: {error}") from error
        return claims


class OidcProvider(OpenIDConnectProvider):  # type: ignore[misc]
    """The issuer of the settings; the issuer's name and `sub` identify a person."""

    id = "oidc"
    oauth2_adapter_class = OidcAdapter

    def get_login_url(self, request: HttpRequest, **kwargs: Any) -> str:
        return reverse("oidc_login")

    def get_callback_url(self) -> str:
        return reverse("oidc_callback")

    def get_auth_params_from_request(self, request: HttpRequest, action: Any) -> dict[str, str]:
        nonce = request.session[_NONCE_KEY] = secrets.token_urlsafe(16)
        return {**self.get_auth_params(), "nonce": nonce}

    def get_scope_from_request(self, request: HttpRequest) -> list[str]:
        return ["openid", "profile", "email"]

    def extract_extra_data(self, data: dict[str, Any]) -> dict[str, Any]:
        claims = data["id_token"]
        return {"id_token": {name: claims[name] for name in _KEPT if name in claims}}

    def extract_email_addresses(self, data: dict[str, Any]) -> list[Any]:
        """Return the address; it is verified only if `email_verified` is the boolean `true`."""
        claims = data["id_token"]
        email = claims.get("email")
        if not isinstance(email, str):
            return []
        is_verified = claims.get("email_verified") is True
        return [EmailAddress(email=email.lower(), verified=is_verified, primary=True)]


def _key_of(id_token: str, keys: jwt.PyJWKSet) -> jwt.PyJWK:
    """Return the issuer's key that the token names, or its only key when it names none."""
    kid = jwt.get_unverified_header(id_token).get("kid")
    found = [key for key in keys.keys if kid is None or key.key_id == kid]
    if len(found) != 1:
        raise jwt.InvalidKeyError("it does not name a key of the issuer")
    return found[0]


provider_classes = [OidcProvider]
