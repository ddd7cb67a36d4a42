"""Signing in and out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.core.cache import cache
from django.test import Client

from controlplane.console import throttle
from tests.controlplane.conftest import PASSWORD, Party

SIGN_IN = "/console/sign-in"


@pytest.fixture(autouse=True)
def _no_failures_of_others() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


def test_signs_in_whatever_the_case_of_the_address(acme: Party) -> None:
    browser = Client()
    answer = browser.post(SIGN_IN, {"email": "Owner@ACME.example", "password": PASSWORD})
    assert (answer.status_code, answer.url) == (302, "/console/")
    assert browser.get("/console/").status_code == 200


def test_goes_where_the_person_was_going(acme: Party) -> None:
    form = {"email": acme.owner.email, "password": PASSWORD, "next": "/console/keys"}
    assert Client().post(SIGN_IN, form).url == "/console/keys"


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "javascript:alert(1)"]
)
def test_goes_to_no_other_site(target: str, acme: Party) -> None:
    form = {"email": acme.owner.email, "password": PASSWORD, "next": target}
    assert Client().post(SIGN_IN, form).url == "/console/"


def test_unknown_address_and_wrong_password_look_the_same(acme: Party) -> None:
    wrong = Client().post(SIGN_IN, {"email": acme.owner.email, "password": "wrong"})
    unknown = Client().post(SIGN_IN, {"email": "nobody@acme.example", "password": "wrong"})
    assert wrong.status_code == unknown.status_code == 422
    message = b"This e-mail address and password do not match."
    assert message in wrong.content
    assert message in unknown.content


def test_bad_form_says_so_beside_the_field(db: None) -> None:
    answer = Client().post(SIGN_IN, {"email": "no address", "password": ""})
    assert answer.status_code == 422
    assert b'id="id_email_error"' in answer.content
    assert b'id="id_password_error"' in answer.content


def test_guessing_is_stopped_for_that_person_alone(acme: Party) -> None:
    browser = Client()
    for _ in range(throttle.MAX_FAILURES):
        browser.post(SIGN_IN, {"email": acme.owner.email, "password": "guess"})
    right = browser.post(SIGN_IN, {"email": acme.owner.email, "password": PASSWORD})
    assert right.status_code == 429
    assert int(right.headers["Retry-After"]) == throttle.WINDOW_S
    other = browser.post(SIGN_IN, {"email": acme.viewer.email, "password": PASSWORD})
    assert other.status_code == 302


def test_signs_out(acme: Party) -> None:
    browser = Client()
    browser.force_login(acme.owner)
    assert browser.get("/console/sign-out").status_code == 405
    browser.post("/console/sign-out")
    assert browser.get("/console/").status_code == 302
