"""Signing in and out by password."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from allauth.usersessions.models import UserSession
from django.conf import settings as django_settings
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.test import Client, override_settings
from django.utils import timezone

from controlplane.console.signin import guessing
from controlplane.console.signin.tasks import sessions_forget
from tests.controlplane.conftest import PASSWORD, Party

SIGN_IN = "/console/sign-in"
#: Wrong passwords for an account from one address in five minutes.
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


def attempt(browser: Client, email: str, password: str) -> bool:
    """Whether the password opened the console. Too many attempts are an answer of their own."""
    answer = browser.post(SIGN_IN, {"login": email, "password": password})
    is_in = answer.status_code == 302
    assert is_in or (b"do not match" in answer.content) != (b"Too many" in answer.content)
    return is_in


def guess(email: str, *, address: str = "198.51.100.1", times: int = MAX_FAILURES) -> None:
    for _ in range(times):
        assert not attempt(Client(REMOTE_ADDR=address), email, "guess")


def test_guessing_is_stopped_at_its_address_and_for_that_person_alone(acme: Party) -> None:
    guess(acme.owner.email)
    there = Client(REMOTE_ADDR="198.51.100.1")
    form = {"login": acme.owner.email, "password": PASSWORD}
    assert b"Too many attempts" in there.post(SIGN_IN, form).content
    assert there.get("/console/").status_code == 302
    assert attempt(there, acme.viewer.email, PASSWORD)


def test_no_stranger_locks_a_person_out(acme: Party) -> None:
    """Neither from elsewhere, nor beside them at an address that both come from."""
    here = Client(REMOTE_ADDR="192.0.2.7")
    guess(acme.owner.email, times=2 * MAX_FAILURES)
    assert attempt(here, acme.owner.email, PASSWORD)
    guess(acme.owner.email, address="192.0.2.7", times=2 * MAX_FAILURES)
    here.post("/console/sign-out")
    assert attempt(here, acme.owner.email, PASSWORD)


def test_guessing_from_many_addresses_is_stopped_but_not_the_persons_browser(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guessing, "_ACCOUNT", "20/3600s/key")
    theirs = Client(REMOTE_ADDR="192.0.2.7")
    assert attempt(theirs, acme.owner.email, PASSWORD)
    theirs.post("/console/sign-out")
    for number in range(5):
        guess(acme.owner.email, address=f"203.0.113.{number}")
    stranger = Client(REMOTE_ADDR="203.0.113.99")
    form = {"login": acme.owner.email, "password": PASSWORD}
    assert b"Too many attempts" in stranger.post(SIGN_IN, form).content
    # They travel. That a browser is known for one account is no help with another.
    theirs.defaults["REMOTE_ADDR"] = "203.0.113.50"
    assert attempt(theirs, acme.owner.email, PASSWORD)
    assert attempt(stranger, acme.viewer.email, PASSWORD)
    stranger.post("/console/sign-out")
    assert b"Too many attempts" in stranger.post(SIGN_IN, form).content


def test_a_known_browser_guesses_no_faster(acme: Party) -> None:
    theirs = Client(REMOTE_ADDR="192.0.2.7")
    assert attempt(theirs, acme.owner.email, PASSWORD)
    theirs.post("/console/sign-out")
    for _ in range(MAX_FAILURES):
        assert not attempt(theirs, acme.owner.email, "guess")
    form = {"login": acme.owner.email, "password": PASSWORD}
    assert b"Too many attempts" in theirs.post(SIGN_IN, form).content


def test_a_browser_is_a_stranger_again_after_a_new_password(acme: Party) -> None:
    theirs = Client(REMOTE_ADDR="192.0.2.7")
    assert attempt(theirs, acme.owner.email, PASSWORD)
    theirs.post("/console/sign-out")
    acme.owner.set_password("another long passphrase")
    acme.owner.save()
    guess(acme.owner.email, address="192.0.2.7")
    form = {"login": acme.owner.email, "password": "another long passphrase"}
    assert b"Too many attempts" in theirs.post(SIGN_IN, form).content


@pytest.mark.parametrize("cookie", ["", "x", "a:b:c", "W10:1abc:sig", "x" * 9000, "\0"])
def test_a_made_up_browser_is_a_strangers(acme: Party, cookie: str) -> None:
    browser = Client(REMOTE_ADDR="192.0.2.7")
    guess(acme.owner.email, address="192.0.2.7")
    browser.cookies[guessing.COOKIE] = cookie
    form = {"login": acme.owner.email, "password": PASSWORD}
    assert b"Too many attempts" in browser.post(SIGN_IN, form).content


def test_at_once_from_one_address_no_more_is_tried_than_one_after_the_other(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []

    def look(request: object, **credentials: str) -> None:
        looked_at.append(credentials)

    monkeypatch.setattr("allauth.account.adapter.authenticate", look)
    form = {"login": acme.owner.email, "password": "guess"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: Client().post(SIGN_IN, form), range(24)))
    assert 1 <= len(looked_at) <= MAX_FAILURES


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
        assert b"Not available now" in answer.content
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
