"""The addresses of sign-in and of a person's own account, under /console/."""

from allauth.account import views as account
from django.conf import settings
from django.urls import include, path
from django.views.generic import RedirectView

from controlplane.console.signin import views

_SIGN_IN = account.LoginView.as_view(
    extra_context={"issuer": settings.OIDC_NAME if settings.OIDC_ISSUER else ""}
)
_TO_SECURITY = RedirectView.as_view(pattern_name="console:security")

urlpatterns = [
    # One page for a person's second factors, passkeys and sessions instead of allauth's four.
    path("account/2fa/", _TO_SECURITY),
    path("account/2fa/webauthn/", _TO_SECURITY),
    path("account/email/", _TO_SECURITY),
    path("account/login/", RedirectView.as_view(pattern_name="account_login")),
    path("account/", include("allauth.account.urls")),
    path("account/2fa/", include("allauth.mfa.urls")),
    path("account/3rdparty/", include("allauth.socialaccount.urls")),
    path("account/sessions/", include("allauth.usersessions.urls")),
    # allauth links to the last of two addresses with the same name.
    path("sign-in", _SIGN_IN, name="account_login"),
    path("sign-out", views.sign_out, name="account_logout"),
    path("sign-in/oidc", views.oidc_login, name="oidc_login"),
    path("sign-in/oidc/callback", views.oidc_callback, name="oidc_callback"),
]
