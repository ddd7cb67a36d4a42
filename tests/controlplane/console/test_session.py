"""Signing in and out by password."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from allauth.usersessions.models import UserSession
from django.conf import settings as django_settings
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.test import Client, override_settings
from django.utils import timezone

from controlplane.signin.tasks import sessions_forget
from tests.controlplane.conftest import PASSWORD, Party

SIGN_IN = "/console/sign-in"
#: Wrong passwords for one address in five minutes.
MAX_FAILURES = 5


@pytest.fixture(autouse=True)
def _no_failures_of_others() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


def test_signs_in_whatever_the_case_of_the_address(acme: Party) -> None:
    browser = Client()
    answer = browser.post(SIGN_IN, {"login": "Owner@ACME.example", "password": PASSWORD})
    assert (answer.status_code, answer.url) == (302, "/console/")
    assert browser.get("/console/").status_code == 200


def test_goes_where_the_person_was_going(acme: Party) -> None:
    form = {"login": acme.owner.email, "password": PASSWORD, "next": "/console/keys"}
    assert Client().post(SIGN_IN, form).url == "/console/keys"


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "javascript:alert(1)"]
)
def test_goes_to_no_other_site(target: str, acme: Party) -> None:
    form = {"login": acme.owner.email, "password": PASSWORD, "next": target}
    assert Client().post(SIGN_IN, form).url == "/console/"


def test_unknown_address_wrong_password_and_closed_account_look_the_same(acme: Party) -> None:
    acme.viewer.is_active = False
    acme.viewer.save()
    message = b"This e-mail address and password do not match."
    for email, password in (
        (acme.owner.email, "wrong"),
        ("nobody@acme.example", "wrong"),
        (acme.viewer.email, PASSWORD),
    ):
        browser = Client()
        answer = browser.post(SIGN_IN, {"login": email, "password": password})
        assert message in answer.content
        assert browser.get("/console/").status_code == 302


def test_bad_form_says_so_beside_the_field(db: None) -> None:
    answer = Client().post(SIGN_IN, {"login": "no address", "password": ""})
    assert b'id="id_login_error"' in answer.content
    assert b'id="id_password_error"' in answer.content


def test_guessing_is_stopped_for_that_person_alone(acme: Party) -> None:
    browser = Client()
    for _ in range(MAX_FAILURES):
        browser.post(SIGN_IN, {"login": acme.owner.email, "password": "guess"})
    # From wherever it is tried: the count is the account's, and every process sees it.
    elsewhere = Client(REMOTE_ADDR="192.0.2.7")
    right = elsewhere.post(SIGN_IN, {"login": acme.owner.email, "password": PASSWORD})
    assert b"Too many attempts" in right.content
    assert elsewhere.get("/console/").status_code == 302
    other = browser.post(SIGN_IN, {"login": acme.viewer.email, "password": PASSWORD})
    assert other.status_code == 302


def test_guessing_at_many_accounts_is_stopped_for_that_address_alone(acme: Party) -> None:
    browser = Client()
    for number in range(10):
        browser.post(SIGN_IN, {"login": f"guess{number}@acme.example", "password": "guess"})
    form = {"login": acme.owner.email, "password": PASSWORD}
    assert b"Too many attempts" in browser.post(SIGN_IN, form).content
    assert Client(REMOTE_ADDR="192.0.2.7").post(SIGN_IN, form).status_code == 302


def test_signs_out(acme: Party) -> None:
    browser = Client()
    browser.force_login(acme.owner)
    assert browser.get("/console/sign-out").status_code == 405
    browser.post("/console/sign-out")
    assert browser.get("/console/").status_code == 302


def test_nobody_makes_an_account_by_a_form(db: None) -> None:
    form = {"email": "new@acme.example", "password1": PASSWORD}
    for path in ("/console/account/signup/", "/console/account/3rdparty/signup/"):
        Client().post(path, form, follow=True)
    from controlplane.tenants.models import User

    assert not User.objects.exists()


def test_without_redis_nobody_signs_in_and_is_told(acme: Party) -> None:
    inside = Client()
    inside.force_login(acme.owner)
    away = django_settings.CACHES["default"] | {"LOCATION": "redis://127.0.0.1:1/0"}
    with override_settings(CACHES={"default": away}):
        answer = Client().post(SIGN_IN, {"login": acme.owner.email, "password": PASSWORD})
        assert answer.status_code == 503
        assert b"Not just now" in answer.content
        assert inside.get("/console/").status_code == 200


def test_clearing_the_cache_leaves_the_rest_of_redis_alone() -> None:
    with redis.Redis.from_url(django_settings.REDIS_URL) as client:
        client.set("not the cache's", "kept")
        cache.set("mine", 1)
        cache.clear()
        assert cache.get("mine") is None
        assert client.getdel("not the cache's") == b"kept"


def test_sessions_that_are_over_are_forgotten(acme: Party) -> None:
    old, new = Client(), Client()
    for browser in (old, new):
        browser.post(SIGN_IN, {"login": acme.owner.email, "password": PASSWORD})
    key = old.session.session_key
    Session.objects.filter(session_key=key).update(expire_date=timezone.now())
    sessions_forget()
    assert not Session.objects.filter(session_key=key).exists()
    kept = list(UserSession.objects.values_list("session_key", flat=True))
    assert kept == [new.session.session_key]
    assert new.get("/console/").status_code == 200
