"""allauth's forms, in the console's words."""

from __future__ import annotations

from typing import Any

from allauth.account import forms as account
from allauth.mfa.base import forms as base
from allauth.mfa.webauthn import forms as webauthn
from django import forms

_EMAIL_LABEL = "E-mail address"


def _plain(form: forms.BaseForm) -> None:
    """Without placeholders: they repeat the labels."""
    for field in form.fields.values():
        field.widget.attrs.pop("placeholder", None)


class SignInForm(account.LoginForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        login = self.fields["login"]
        login.label = _EMAIL_LABEL
        login.widget.attrs |= {"autocomplete": "username", "autofocus": True}


class ResetPasswordForm(account.ResetPasswordForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        self.fields["email"].label = _EMAIL_LABEL


class ResetPasswordKeyForm(account.ResetPasswordKeyForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        self.fields["password1"].label = "New password"
        self.fields["password2"].label = "The same again"


class ChangePasswordForm(account.ChangePasswordForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        self.fields["oldpassword"].label = "Present password"
        self.fields["password1"].label = "New password"
        self.fields["password2"].label = "The same again"


class SetPasswordForm(account.SetPasswordForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        self.fields["password1"].label = "New password"
        self.fields["password2"].label = "The same again"


class ReauthenticateForm(account.ReauthenticateForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        self.fields["password"].widget.attrs["autofocus"] = True


class AuthenticateForm(base.AuthenticateForm):
    """The second step: a code of the app, or a recovery code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _plain(self)
        self.fields["code"].label = "Code"


class AddPasskeyForm(webauthn.AddWebAuthnForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["name"].label = "Name"
        self.fields["name"].max_length = 100
        is_passkey = self.fields["passwordless"]
        is_passkey.label = "Sign in with it alone, without a password"
        is_passkey.help_text = "It then asks for your finger, your face or its PIN."
        is_passkey.initial = True
