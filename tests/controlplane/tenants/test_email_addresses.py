"""Whose an address is: nobody comes before its owner and stays."""

from __future__ import annotations

import re
import time

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import SECRET_SESSION_KEY, format_hotp_value, hotp_value
from django.core import mail
from django.test import Client
from django.urls import reverse

from controlplane.tenants import services
from controlplane.tenants.models import User
from tests.controlplane.conftest import PASSWORD, Party, make_operator
from tests.controlplane.console.conftest import browser_of

VICTIM = "victim@example.com"
RESET, ACTIVATE = "/console/account/password/reset/", "/console/account/2fa/totp/activate/"


def take_ones_own_invite(party: Party) -> Client:
    """Whoever invites somebody has the token too, and may accept it in their place."""
    form = {"email": VICTIM, "role": "viewer"}
    page = browser_of(party.owner).post("/console/members/invites", form).content.decode()
    [path] = re.findall(r'id="new-invite">http://127.0.0.1:8000([^<]+)<', page)
    attacker = Client()
    assert attacker.post(path, {"password": PASSWORD}).status_code == 302
    assert attacker.get("/console/").status_code == 200
    return attacker


def add_an_app(browser: Client, password: str) -> None:
    """As far as the pages let them."""
    browser.post("/console/account/reauthenticate/", {"password": password})
    browser.get(ACTIVATE)
    secret = browser.session.get(SECRET_SESSION_KEY) or "A" * 32
    code = format_hotp_value(hotp_value(secret, int(time.time()) // 30))
    browser.post(ACTIVATE, {"code": code})


def reset_link(address: str) -> str | None:
    """What the mail leads to, if one comes."""
    mail.outbox.clear()
    Client().post(RESET, {"email": address})
    found = [re.search(r"http://127.0.0.1:8000(\S+/reset/key/\S+)", m.body) for m in mail.outbox]
    return next((match[1] for match in found if match), None)


def test_who_took_an_address_keeps_no_way_in(acme: Party) -> None:
    attacker = take_ones_own_invite(acme)
    add_an_app(attacker, PASSWORD)
    attacker.post("/console/account/2fa/webauthn/add/", {"name": "mine", "credential": "{}"})
    assert not Authenticator.objects.exists()
    assert b"not verified" in attacker.get("/console/security").content

    victim, path = Client(), reset_link(VICTIM)
    assert path is not None
    form_page = victim.get(path).url
    words = "another long passphrase"
    assert victim.post(form_page, {"password1": words, "password2": words}).status_code == 302
    assert attacker.get("/console/").status_code == 302
    victim.post("/console/sign-in", {"login": VICTIM, "password": words})
    assert victim.get("/console/").status_code == 200
    add_an_app(victim, words)
    assert Authenticator.objects.filter(user__email=VICTIM).exists(), "they read the mail"


def test_address_that_an_operator_replaced_opens_nothing(acme: Party) -> None:
    operator = make_operator("op@example.com")
    old = acme.viewer.email
    assert reset_link(old)
    form = {"email": "New@acme.example", "first_name": "", "last_name": "", "is_active": "on"}
    url = reverse("admin:tenants_user_change", args=[acme.viewer.pk])
    assert browser_of(operator).post(url, form).status_code == 302
    assert User.objects.get(pk=acme.viewer.pk).email == "new@acme.example"
    assert reset_link(old) is None
    browser = Client()
    browser.post("/console/sign-in", {"login": old, "password": PASSWORD})
    assert browser.get("/console/").status_code == 302
    assert reset_link("new@acme.example")
    assert EmailAddress.objects.get(user=acme.viewer).verified


@pytest.mark.parametrize("is_proven", [True, False])
def test_an_address_is_one_persons(is_proven: bool, acme: Party) -> None:
    EmailAddress.objects.create(user=acme.viewer, email="moved@acme.example", verified=True)
    user = services.user_create(email="moved@acme.example", password=PASSWORD, is_proven=is_proven)
    row = EmailAddress.objects.get(email="moved@acme.example")
    assert (row.user, row.verified) == (user, is_proven)
