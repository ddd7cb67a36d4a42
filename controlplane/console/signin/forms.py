"""allauth's forms, with the console's labels."""

from __future__ import annotations

from typing import Any

from allauth.account import forms as account
from allauth.mfa.base import forms as base
from allauth.mfa.webauthn import forms as webauthn
from django import forms

_EMAIL_LABEL = "E-mail address"
_NEW_PASSWORD = {"password1": "New password", "password2": "The same again"}


def _label(form: forms.BaseForm, **labels: str) -> None:
    """Set the labels of fields, and remove placeholders, which would repeat them."""
    for field in form.fields.values():
        field.widget.attrs.pop("placeholder", None)
    for name, label in labels.items():
        form.fields[name].label = label


class SignInForm(account.LoginForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self, login=_EMAIL_LABEL)
        self.fields["login"].widget.attrs |= {"autocomplete": "username", "autofocus": True}


class ResetPasswordForm(account.ResetPasswordForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self, email=_EMAIL_LABEL)


class ResetPasswordKeyForm(account.ResetPasswordKeyForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self, **_NEW_PASSWORD)


class ChangePasswordForm(account.ChangePasswordForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self, oldpassword="Present password", **_NEW_PASSWORD)


class SetPasswordForm(account.SetPasswordForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self, **_NEW_PASSWORD)


class ReauthenticateForm(account.ReauthenticateForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self)
        self.fields["password"].widget.attrs["autofocus"] = True


class AuthenticateForm(base.AuthenticateForm):
    """The second step: a code from the app, or a recovery code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _label(self, code="Code")


class AddPasskeyForm(webauthn.AddWebAuthnForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["name"].label = "Name"
        self.fields["name"].max_length = 100
        is_passkey = self.fields["passwordless"]
        is_passkey.label = "Sign in with it alone, without a password"
        is_passkey.help_text = "Your device then asks for your finger, your face or its PIN."
        is_passkey.initial = True
