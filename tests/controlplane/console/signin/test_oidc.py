"""Signing in with an issuer: whom it lets in, and what of it is believed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
import pytest
import requests
from allauth.account.models import EmailAddress
from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret
from allauth.socialaccount.models import SocialAccount
from cryptography.hazmat.primitives.asymmetric import rsa
from django.test import Client

from controlplane.events.audit.models import AuditEvent
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import User
from tests.controlplane.conftest import PASSWORD, Party
from tests.oidc_issuer import CLIENT_ID, CLIENT_SECRET, Claims, Issuer

START, CALLBACK = "/console/sign-in/oidc", "/console/sign-in/oidc/callback"


@pytest.fixture
def issuer(settings: Any) -> Iterator[Issuer]:
    made = Issuer()
    settings.OIDC_ISSUER = made.url
    app = {
        "provider_id": made.url,
        "name": "Test issuer",
        "client_id": CLIENT_ID,
        "secret": CLIENT_SECRET,
        "settings": {"server_url": made.url},
    }
    settings.SOCIALACCOUNT_PROVIDERS = {"oidc": {"APPS": [app], "OAUTH_PKCE_ENABLED": True}}
    yield made
    made.close()


def go_there(browser: Client) -> str:
    """Start at our page and pass the issuer's. -> where it sends the browser back to."""
    page = browser.post(START).content.decode()
    [url] = re.findall(r'http-equiv="refresh" content="0;url=([^"]+)"', page)
    answer = requests.get(unescape(url), allow_redirects=False, timeout=5)
    assert answer.status_code == 302
    back = answer.headers["Location"]
    assert back.startswith(f"http://127.0.0.1:8000{CALLBACK}?")
    return back.removeprefix("http://127.0.0.1:8000")


def sign_in(browser: Client) -> Any:
    return browser.get(go_there(browser))


def is_in(browser: Client) -> bool:
    return browser.get("/console/").status_code == 200


def owner_of(party: Party, **claims: Any) -> Claims:
    return {"sub": "42", "email": party.owner.email, "email_verified": True, **claims}


def test_a_verified_address_is_its_person(issuer: Issuer, acme: Party) -> None:
    issuer.person = owner_of(acme, email=acme.owner.email.upper())
    browser = Client()
    answer = sign_in(browser)
    assert (answer.status_code, answer.url) == (302, "/console/")
    assert is_in(browser)
    account = SocialAccount.objects.get()
    assert (account.user, account.provider, account.uid) == (acme.owner, issuer.url, "42")
    with tenant_scope(acme.tenant.id):
        actions = list(AuditEvent.objects.values_list("action", flat=True))
    assert {"user.signed_in", "user.issuer_linked"} <= set(actions)


def test_afterwards_the_person_is_known_by_the_issuers_name_for_them(
    issuer: Issuer, acme: Party
) -> None:
    issuer.person = owner_of(acme)
    sign_in(Client())
    issuer.person = {"sub": "42", "email": "elsewhere@example.com", "email_verified": False}
    browser = Client()
    sign_in(browser)
    assert is_in(browser)


@pytest.mark.parametrize("said", [False, None, "true", "false", 1])
def test_an_address_that_is_not_verified_is_nobody(said: Any, issuer: Issuer, acme: Party) -> None:
    issuer.person = owner_of(acme, email_verified=said)
    browser = Client()
    answer = sign_in(browser)
    assert answer.status_code == 403
    assert b"There is no account for you here" in answer.content
    assert not is_in(browser)
    assert not SocialAccount.objects.exists()


def test_a_stranger_gets_no_account(issuer: Issuer, acme: Party) -> None:
    people = User.objects.count()
    issuer.person = {"sub": "9", "email": "stranger@example.com", "email_verified": True}
    browser = Client()
    assert sign_in(browser).status_code == 403
    browser.post("/console/account/3rdparty/signup/", {"email": "stranger@example.com"})
    assert not is_in(browser)
    assert User.objects.count() == people


def test_a_closed_account_stays_closed(issuer: Issuer, acme: Party) -> None:
    User.objects.filter(pk=acme.owner.pk).update(is_active=False)
    issuer.person = owner_of(acme)
    browser = Client()
    sign_in(browser)
    assert not is_in(browser)


def test_the_second_factor_is_asked_for_all_the_same(issuer: Issuer, acme: Party) -> None:
    TOTP.activate(acme.owner, generate_totp_secret())
    issuer.person = owner_of(acme)
    browser = Client()
    assert sign_in(browser).url == "/console/account/2fa/authenticate/"
    assert not is_in(browser)


def test_a_password_that_somebody_else_may_have_chosen_ends(issuer: Issuer, acme: Party) -> None:
    """Nobody ever proved that the address is theirs, until the issuer did."""
    EmailAddress.objects.filter(user=acme.owner).update(verified=False)
    issuer.person = owner_of(acme)
    sign_in(Client())
    acme.owner.refresh_from_db()
    assert not acme.owner.has_usable_password()
    assert EmailAddress.objects.get(user=acme.owner).verified


def test_a_password_of_a_proven_address_stays(issuer: Issuer, acme: Party) -> None:
    assert EmailAddress.objects.get(user=acme.owner).verified
    issuer.person = owner_of(acme)
    sign_in(Client())
    acme.owner.refresh_from_db()
    assert acme.owner.has_usable_password()


STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def claims_with(**changed: Any) -> Callable[[Issuer], None]:
    def tamper(issuer: Issuer) -> None:
        def change(claims: Claims) -> Claims:
            changes = {k: v(claims) if callable(v) else v for k, v in changed.items()}
            return {k: v for k, v in {**claims, **changes}.items() if v is not None}

        issuer.change_claims = change

    return tamper


def token_by(make: Callable[[Issuer, Claims], str]) -> Callable[[Issuer], None]:
    def tamper(issuer: Issuer) -> None:
        issuer.change_token = lambda token: make(
            issuer, jwt.decode(token, options={"verify_signature": False})
        )

    return tamper


def by_shared_secret(issuer: Issuer, claims: Claims) -> str:
    """Signed with what is public, or known to the client, as if it were a secret of theirs."""
    return issuer.sign(claims, CLIENT_SECRET * 3, "HS256")


@pytest.mark.parametrize(
    "tamper",
    [
        token_by(lambda issuer, claims: issuer.sign(claims, STRANGER)),
        token_by(by_shared_secret),
        token_by(lambda issuer, claims: jwt.encode(claims, None, algorithm="none")),
        token_by(lambda issuer, claims: "no.token.atall"),
        token_by(lambda issuer, claims: ""),
        claims_with(iss="https://evil.example"),
        claims_with(aud="another client"),
        claims_with(exp=lambda _: int(time.time()) - 3600),
        claims_with(exp=None),
        claims_with(sub=None),
        claims_with(nonce="of another sign-in"),
        claims_with(nonce=None),
    ],
    ids=[
        *("a strangers key", "a shared secret", "no signature", "garbage", "no token"),
        *("another issuer", "another client", "expired", "without end", "nobody"),
        *("another nonce", "no nonce"),
    ],
)
def test_a_token_that_does_not_hold_opens_nothing(
    tamper: Callable[[Issuer], None], issuer: Issuer, acme: Party
) -> None:
    issuer.person = owner_of(acme)
    tamper(issuer)
    browser = Client()
    answer = sign_in(browser)
    assert b"You are not signed in" in answer.content
    assert not is_in(browser)
    assert not SocialAccount.objects.exists()


def test_an_answer_that_nobody_asked_for_opens_nothing(issuer: Issuer, acme: Party) -> None:
    """Somebody sends their own answer to a victim, who would then work in their account."""
    issuer.person = owner_of(acme)
    theirs = go_there(Client())
    victim = Client()
    assert b"You are not signed in" in victim.get(theirs).content
    assert not is_in(victim)
    code = parse_qs(urlsplit(theirs).query)["code"][0]
    own = go_there(victim)
    state = parse_qs(urlsplit(own).query)["state"][0]
    injected = f"{CALLBACK}?{urlencode({'code': code, 'state': state})}"
    assert b"You are not signed in" in victim.get(injected).content
    assert not is_in(victim)


def test_an_answer_works_once(issuer: Issuer, acme: Party) -> None:
    issuer.person = owner_of(acme)
    browser = Client()
    back = go_there(browser)
    browser.get(back)
    browser.post("/console/sign-out")
    browser.get(back)
    assert not is_in(browser)


def test_an_address_from_the_user_info(issuer: Issuer, acme: Party) -> None:
    issuer.person = owner_of(acme)
    claims_with(email=None, email_verified=None)(issuer)
    browser = Client()
    sign_in(browser)
    assert is_in(browser)
    issuer.userinfo = owner_of(acme, sub="43")
    assert b"You are not signed in" in sign_in(Client()).content


def test_an_issuer_that_is_down_is_told(issuer: Issuer, acme: Party) -> None:
    issuer.person = owner_of(acme)
    browser = Client()
    back = go_there(browser)
    issuer.is_down = True
    assert Client().post(START).status_code == 502
    assert not is_in(browser)
    assert browser.get(back).status_code in (200, 401, 502)
    assert not is_in(browser)


def test_nothing_starts_by_a_link_and_nothing_without_an_issuer(
    issuer: Issuer, db: None, settings: Any
) -> None:
    assert Client().get(START).status_code == 405
    settings.OIDC_ISSUER = ""
    assert Client().post(START).status_code == 404
    assert Client().get(CALLBACK).status_code == 404


def test_no_token_is_kept(issuer: Issuer, acme: Party) -> None:
    issuer.person = owner_of(acme, phone_number="+1 555 0100")
    sign_in(Client())
    kept = json.dumps(SocialAccount.objects.get().extra_data)
    assert "0100" not in kept
    assert "eyJ" not in kept


def test_nobody_links_an_issuers_account_by_hand(issuer: Issuer, acme: Party) -> None:
    """It would open the account also after a lost password has been replaced."""
    issuer.person = {"sub": "9", "email": "stranger@example.com", "email_verified": True}
    browser = Client()
    browser.post("/console/sign-in", {"login": acme.owner.email, "password": PASSWORD})
    assert is_in(browser)
    page = browser.post(f"{START}?process=connect").content.decode()
    [url] = re.findall(r'http-equiv="refresh" content="0;url=([^"]+)"', page)
    back = requests.get(unescape(url), allow_redirects=False, timeout=5).headers["Location"]
    browser.post("/console/account/reauthenticate/", {"password": PASSWORD})
    answer = browser.get(back.removeprefix("http://127.0.0.1:8000"))
    assert answer.status_code == 403
    assert not SocialAccount.objects.exists()
