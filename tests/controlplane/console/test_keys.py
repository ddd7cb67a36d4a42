"""The page of the API keys."""

from __future__ import annotations

import re

from controlplane.scoping import tenant_scope
from controlplane.tenants.auth import authenticate
from controlplane.tenants.keys import KEY_REGEX
from controlplane.tenants.models import ApiKey
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import browser_of


def test_new_key_works_and_is_shown_once(acme: Party) -> None:
    browser = browser_of(acme.owner)
    answer = browser.post("/console/keys/new", {"name": "billing", "lifetime": "never"})
    shown = re.findall(KEY_REGEX, answer.content.decode())
    assert len(shown) == 1
    assert authenticate(f"Bearer {shown[0]}").tenant == acme.tenant
    later = browser.get("/console/keys").content.decode()
    assert "billing" in later
    assert shown[0][-49:-6] not in later
    assert not re.search(KEY_REGEX, later)


def test_answer_to_htmx_is_the_part_alone(acme: Party) -> None:
    answer = browser_of(acme.owner).post(
        "/console/keys/new", {"name": "x", "lifetime": "30"}, headers={"hx-request": "true"}
    )
    assert b"<html" not in answer.content
    with tenant_scope(acme.tenant.id):
        key = ApiKey.objects.get(name="x")
    assert key.expires_at is not None
    assert (key.expires_at - key.created_at).days in (29, 30)


def test_name_is_asked_for_beside_the_field(acme: Party) -> None:
    answer = browser_of(acme.owner).post("/console/keys/new", {"name": "", "lifetime": "never"})
    assert answer.status_code == 422
    assert b'id="id_name_error"' in answer.content


def test_name_is_text_not_markup(acme: Party) -> None:
    answer = browser_of(acme.owner).post(
        "/console/keys/new", {"name": "<script>alert(1)</script>", "lifetime": "never"}
    )
    assert b"<script>alert" not in answer.content
    assert b"&lt;script&gt;alert" in answer.content


def test_revoking_asks_first(acme: Party) -> None:
    browser = browser_of(acme.owner)
    path = f"/console/keys/{acme.api_key.public_id}/revoke"
    assert b"cannot be undone" in browser.get(path).content
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.get(pk=acme.api_key.pk).revoked_at is None
        assert browser.post(path).status_code == 302
        assert ApiKey.objects.get(pk=acme.api_key.pk).revoked_at is not None
    assert b"revoked" in browser.get("/console/keys").content


def test_rotating_asks_first_and_shows_the_new_key_once(acme: Party) -> None:
    browser = browser_of(acme.owner)
    path = f"/console/keys/{acme.api_key.public_id}/rotate"
    assert b"goes on working" in browser.get(path).content
    assert authenticate(acme.header)
    answer = browser.post(path, {"grace": "86400"}).content.decode()
    (shown,) = re.findall(KEY_REGEX, answer)
    for text in (shown, acme.key_text):
        assert authenticate(f"Bearer {text}").api_key == acme.api_key
    assert not re.search(KEY_REGEX, browser.get("/console/keys").content.decode())
    assert browser.post(path, {"grace": "1"}).status_code == 422
    assert browser_of(acme.viewer).post(path, {"grace": "0"}).status_code == 403


def test_viewer_sees_keys_but_no_buttons(acme: Party) -> None:
    page = browser_of(acme.viewer).get("/console/keys").content
    assert acme.api_key.last4.encode() in page
    assert b"Create key" not in page
    assert b"/revoke" not in page
