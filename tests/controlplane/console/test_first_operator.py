"""The first operator gets in by a link that works once; nobody else is offered one."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.test import Client

from controlplane.console.signin.first_operator import first_operator, password_link
from controlplane.errors import Conflict
from controlplane.tenants import services
from controlplane.tenants.models import User
from tests.controlplane.conftest import Party

PASSWORD = "a long passphrase of nobody"

pytestmark = pytest.mark.django_db


def choose_password(link: str) -> int:
    """Follow the link as a browser does. -> the status of the page where it leads."""
    browser = Client()
    page = browser.get(urlsplit(link).path, follow=True)
    action = page.redirect_chain[-1][0] if page.redirect_chain else urlsplit(link).path
    form = {"password1": PASSWORD, "password2": PASSWORD}
    return browser.post(action, form, follow=True).status_code


def test_the_link_lets_its_holder_choose_the_password_once() -> None:
    operator = first_operator("Ops@Example.com")
    assert operator is not None
    assert operator.email == "ops@example.com"
    assert not operator.has_usable_password()
    link = password_link(operator)
    assert link.startswith(f"{settings.BASE_URL}/console/account/password/reset/key/")
    choose_password(link)
    operator.refresh_from_db()
    assert operator.check_password(PASSWORD)
    page = Client().get(urlsplit(link).path, follow=True)
    assert not re.search(r'name="password1"', page.content.decode())


def test_every_start_finds_the_same_one_until_somebody_can_sign_in() -> None:
    assert first_operator("ops@example.com") == first_operator("other@example.com")
    services.user_password_set(user=User.objects.get(is_staff=True), password=PASSWORD)
    assert first_operator("ops@example.com") is None


def test_an_installation_with_operators_gets_none() -> None:
    services.user_create(
        email="ann@example.com", password=PASSWORD, is_operator=True, is_proven=True
    )
    assert first_operator("ops@example.com") is None
    assert not User.objects.filter(email="ops@example.com").exists()


def test_a_members_address_is_no_operators(acme: Party) -> None:
    with pytest.raises(Conflict, match="choose another address"):
        first_operator(acme.owner.email)
