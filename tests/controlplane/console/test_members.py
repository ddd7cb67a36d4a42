"""Members, invites and service accounts in the console."""

from __future__ import annotations

import io
import logging
import re

import pytest
from django.core import mail
from django.core.cache import cache
from django.core.mail.backends.base import BaseEmailBackend
from django.test import Client

from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import ApiKey, Invite, Membership, Role, ServiceAccount
from controlplane.tenants.services import api_key_create
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import browser_of

INVITES = "/console/members/invites"


def membership(party: Party, name: str) -> Membership:
    with tenant_scope(party.tenant.id):
        return Membership.objects.get(user=getattr(party, name))


def test_a_member_gets_another_role_and_goes(acme: Party) -> None:
    browser, viewer = browser_of(acme.owner), membership(acme, "viewer")
    with tenant_scope(acme.tenant.id):
        key, _ = api_key_create(name="theirs", owner=viewer)
    browser.post(f"/console/members/{viewer.pk}/role", {"role": "developer"})
    assert membership(acme, "viewer").role == Role.DEVELOPER
    path = f"/console/members/{viewer.pk}/remove"
    assert b"1 key of theirs stops" in browser.get(path).content
    browser.post(path)
    with tenant_scope(acme.tenant.id):
        assert not Membership.objects.filter(user=acme.viewer).exists()
        assert ApiKey.objects.get(pk=key.pk).revoked_at is not None


def test_the_last_owner_stays(acme: Party) -> None:
    browser, owner = browser_of(acme.owner), membership(acme, "owner")
    for path, form in (("role", {"role": "viewer"}), ("remove", {})):
        answer = browser.post(f"/console/members/{owner.pk}/{path}", form, follow=True)
        assert b"A tenant needs an owner" in answer.content
    assert membership(acme, "owner").role == Role.OWNER


def test_the_last_who_manages_members_stays(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        Membership.objects.filter(user=acme.owner).update(role=Role.ADMIN)
    browser, admin = browser_of(acme.owner), membership(acme, "owner")
    for path, form in (("role", {"role": "viewer"}), ("remove", {})):
        answer = browser.post(f"/console/members/{admin.pk}/{path}", form, follow=True)
        assert b"Make another member an admin first" in answer.content
    assert membership(acme, "owner").role == Role.ADMIN


def test_an_admin_makes_no_owner(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        Membership.objects.filter(user=acme.viewer).update(role=Role.ADMIN)
    browser = browser_of(acme.viewer)
    path = f"/console/members/{membership(acme, 'viewer').pk}/role"
    answer = browser.post(path, {"role": "owner"}, follow=True)
    assert b"This needs the permission tenant:manage" in answer.content
    assert membership(acme, "viewer").role == Role.ADMIN
    page = browser.get("/console/members").content
    assert b'<option value="owner"' not in page
    form = {"email": "new@acme.example", "role": "owner"}
    assert browser.post(INVITES, form).status_code == 422


@pytest.mark.parametrize("htmx", [True, False])
def test_an_invite_is_shown_once_mailed_and_accepted(htmx: bool, acme: Party) -> None:
    browser = browser_of(acme.owner)
    headers = {"hx-request": "true"} if htmx else {}
    form = {"email": "New@acme.example", "role": "developer"}
    page = browser.post(INVITES, form, headers=headers).content.decode()
    assert ("<html" in page) != htmx
    [url] = re.findall(r'id="new-invite">([^<]+)<', page)
    [sent] = mail.outbox
    assert sent.to == ["new@acme.example"]
    assert url in sent.body
    assert acme.owner.email in sent.body
    later = browser.get("/console/members").content.decode()
    assert url not in later
    assert "pending" in later
    newcomer = Client()
    path = url.removeprefix("http://127.0.0.1:8000")
    answer = newcomer.post(path, {"password": PASSWORD})
    assert (answer.status_code, answer.url) == (302, "/console/")
    assert newcomer.get("/console/").status_code == 200
    assert newcomer.get(path).status_code == 404
    assert b"accepted" in browser.get("/console/members").content


def test_an_invites_mail_may_fail(acme: Party, settings: object) -> None:
    settings.EMAIL_BACKEND = f"{__name__}.Broken"  # type: ignore[attr-defined]
    form = {"email": "new@acme.example", "role": "viewer"}
    page = browser_of(acme.owner).post(INVITES, form).content
    assert b"The mail could not be sent" in page
    assert b'id="new-invite"' in page


class Broken(BaseEmailBackend):
    def send_messages(self, messages: object) -> int:
        raise ConnectionRefusedError


def test_a_revoked_invite_leads_nowhere(acme: Party, globex: Party) -> None:
    browser = browser_of(acme.owner)
    page = browser.post(INVITES, {"email": "new@acme.example", "role": "viewer"}).content.decode()
    [url] = re.findall(r'id="new-invite">([^<]+)<', page)
    with tenant_scope(acme.tenant.id):
        invite = Invite.objects.get()
    path = f"{INVITES}/{invite.pk}/revoke"
    assert browser_of(globex.owner).post(path).status_code == 404
    browser.post(path)
    assert Client().get(url.removeprefix("http://127.0.0.1:8000")).status_code == 404
    assert b"revoked" in browser.get("/console/members").content


def test_a_subject_is_one_line(acme: Party) -> None:
    acme.tenant.name = "Acme\nBcc: everybody@example.com"
    acme.tenant.save()
    browser_of(acme.owner).post(INVITES, {"email": "new@acme.example", "role": "viewer"})
    [sent] = mail.outbox
    assert "\n" not in sent.subject
    assert sent.recipients() == ["new@acme.example"]


def test_a_service_account_from_its_making_to_its_end(acme: Party) -> None:
    browser = browser_of(acme.owner)
    form = {"name": "billing", "role": "viewer", "description": "Sends invoices"}
    assert browser.post("/console/service-accounts/new", form).status_code == 302
    assert browser.post("/console/service-accounts/new", form).status_code == 422
    with tenant_scope(acme.tenant.id):
        account = ServiceAccount.objects.get()
        key, _ = api_key_create(name="theirs", owner=account)
    path = f"/console/service-accounts/{account.pk}"
    assert b"theirs" in browser.get(path).content
    browser.post(path, {"role": "developer", "description": ""})
    with tenant_scope(acme.tenant.id):
        assert ServiceAccount.objects.get().role == Role.DEVELOPER
        browser.post(f"{path}/delete")
        assert not ServiceAccount.objects.exists()
        assert ApiKey.objects.get(pk=key.pk).revoked_at is not None


def test_strangers_things_are_no_things(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id):
        account = ServiceAccount.objects.create(name="zebra")
    browser, viewer = browser_of(globex.owner), membership(acme, "viewer")
    assert browser.post(f"/console/members/{viewer.pk}/role", {"role": "owner"}).status_code == 404
    assert browser.get(f"/console/members/{viewer.pk}/remove").status_code == 404
    assert browser.get(f"/console/service-accounts/{account.pk}").status_code == 404
    assert browser.post(f"/console/service-accounts/{account.pk}/delete").status_code == 404
    for page in ("members", "service-accounts", "keys", "audit"):
        content = browser.get(f"/console/{page}").content
        assert b"acme" not in content
        assert b"zebra" not in content


class TestWhoHasAnAccount:
    """Whoever invites an address can open the invite: it says nothing of the person."""

    @pytest.fixture
    def pages(self, acme: Party, globex: Party) -> dict[str, str]:
        """By address, where acme's invite leads: globex's owner has an account, nobody has none."""
        found = {}
        for email in (globex.owner.email, "nobody@globex.example"):
            page = browser_of(acme.owner).post(INVITES, {"email": email, "role": "viewer"})
            [token] = re.findall(rb'id="new-invite">[^<]+/([^</]+)<', page.content)
            found[email] = f"/console/invites/{token.decode()}"
        return found

    @pytest.mark.parametrize("password", [None, "", "short", "password1234"])
    def test_page_and_refusals_are_the_same(
        self, pages: dict[str, str], password: str | None
    ) -> None:
        answers = set()
        for email, path in pages.items():
            client = Client()
            answer = (
                client.get(path) if password is None else client.post(path, {"password": password})
            )
            text = re.sub(r"[0-9A-Za-z]{64}", "", answer.content.decode())
            answers.add((answer.status_code, text.replace(email, "").replace(path, "")))
        assert len(answers) == 1

    def test_a_wrong_password_is_refused_and_counted(
        self, pages: dict[str, str], globex: Party
    ) -> None:
        cache.clear()
        path = pages[globex.owner.email]
        for number in range(6):
            answer = Client().post(path, {"password": f"a good guess {number}"})
            assert answer.status_code == 422
        assert b"Too many attempts" in answer.content
        cache.clear()

    def test_a_person_with_an_account_joins_by_their_password(
        self, pages: dict[str, str], globex: Party, acme: Party
    ) -> None:
        client, path = Client(), pages[globex.owner.email]
        assert client.post(path, {"password": PASSWORD}).url == path
        assert client.post(path).url == "/console/"
        assert b"Acme" in client.get("/console/").content


def test_no_log_line_has_an_invites_token(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    [handler] = [found for found in logging.getLogger().handlers if found.name == "stderr"]
    monkeypatch.setattr(handler, "stream", written)
    form = {"email": "new@acme.example", "role": "viewer"}
    page = browser_of(acme.owner).post(INVITES, form).content.decode()
    [token] = re.findall(r'id="new-invite">[^<]+/([^</]+)<', page)
    path = f"/console/invites/{token}"
    assert Client().post(path, {"password": "short"}).status_code == 422
    assert Client(enforce_csrf_checks=True).post(path).status_code == 403
    # As uvicorn writes addresses.
    logging.getLogger("uvicorn.error").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:9", "GET", f"{path}?x=1", "1.1", 200
    )
    lines = [line for line in written.getvalue().splitlines() if "/console/invites/" in line]
    assert len(lines) == 5, lines  # two requests have a line of ours and one of Django's
    assert not [line for line in lines if token in line]
