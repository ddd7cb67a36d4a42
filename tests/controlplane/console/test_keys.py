"""The page of the API keys."""

from __future__ import annotations

import datetime as dt
import re

from django.utils import timezone

from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import authenticate
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.key_services import api_key_create
from controlplane.tenants.keys import KEY_REGEX
from controlplane.tenants.models import ApiKey, Membership, Role, ServiceAccount
from controlplane.tenants.permissions import Permission
from controlplane.tenants.services import member_add
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import browser_of

#: What the form of a new key sends.
NEW = {"name": "x", "lifetime": "never", "environment": "live", "scopes": ["read", "infer"]}


def test_new_key_works_and_is_shown_once(acme: Party) -> None:
    browser = browser_of(acme.owner)
    answer = browser.post("/console/keys/new", NEW | {"name": "billing"})
    shown = re.findall(KEY_REGEX, answer.content.decode())
    assert len(shown) == 1
    assert authenticate(f"Bearer {shown[0]}").tenant == acme.tenant
    later = browser.get("/console/keys").content.decode()
    assert "billing" in later
    assert shown[0][-49:-6] not in later
    assert not re.search(KEY_REGEX, later)


def test_answer_to_htmx_is_the_part_alone(acme: Party) -> None:
    answer = browser_of(acme.owner).post(
        "/console/keys/new", NEW | {"lifetime": "30"}, headers={"hx-request": "true"}
    )
    assert b"<html" not in answer.content
    with tenant_scope(acme.tenant.id):
        key = ApiKey.objects.get(name="x")
    assert key.expires_at is not None
    assert (key.expires_at - key.created_at).days in (29, 30)


def test_name_is_asked_for_beside_the_field(acme: Party) -> None:
    answer = browser_of(acme.owner).post("/console/keys/new", NEW | {"name": ""})
    assert answer.status_code == 422
    assert b'id="id_name_error"' in answer.content


def test_name_is_text_not_markup(acme: Party) -> None:
    answer = browser_of(acme.owner).post(
        "/console/keys/new", NEW | {"name": "<script>alert(1)</script>"}
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
    assert b"still works" in browser.get(path).content
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


def test_new_key_has_what_was_chosen_and_no_more(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        account = ServiceAccount.objects.create(name="billing", role=Role.VIEWER)
    form = NEW | {
        "owner": str(account.pk),
        "environment": "test",
        "allowed_models": "invoices, letters@2",
        "allowed_ips": "192.0.2.7\n2001:db8::/32",
    }
    answer = browser_of(acme.owner).post("/console/keys/new", form)
    (text,) = re.findall(KEY_REGEX, answer.content.decode())
    principal = authenticate(f"Bearer {text}", "192.0.2.7")
    # The account may only see: the key's other scopes are of no use.
    assert principal.permissions == {Permission.READ}
    key = principal.api_key
    assert key is not None
    assert (key.service_account, key.environment) == (account, "test")
    assert key.allowed_models == ["invoices", "letters@2"]
    assert key.allowed_ips == ["192.0.2.7/32", "2001:db8::/32"]


def test_nobody_gives_a_key_more_than_they_have(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        admin = member_add(email="admin@acme.example", role=Role.ADMIN, password=PASSWORD).user
        strong, _ = api_key_create(
            name="strong",
            owner=Membership.objects.get(user=acme.owner),
            rules=KeyRules(scopes=tuple(Permission)),
        )
    browser = browser_of(admin)
    form = NEW | {"scopes": ["read", "tenant:manage"]}
    assert browser.post("/console/keys/new", form).status_code == 422
    for verb in ("edit", "rotate"):
        assert browser.get(f"/console/keys/{strong.public_id}/{verb}").status_code == 403
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.filter(name="x").count() == 0


def test_a_key_can_be_changed(acme: Party) -> None:
    browser = browser_of(acme.owner)
    path = f"/console/keys/{acme.api_key.public_id}/edit"
    assert b"checked" in browser.get(path).content
    form = {"name": "narrow", "scopes": ["read"], "allowed_ips": "192.0.2.7"}
    assert browser.post(path, form).status_code == 302
    with tenant_scope(acme.tenant.id):
        key = ApiKey.objects.get(pk=acme.api_key.pk)
    assert (key.name, key.scopes, key.allowed_ips) == ("narrow", ["read"], ["192.0.2.7/32"])
    answer = browser.post(path, form | {"allowed_ips": "nowhere"})
    assert answer.status_code == 422
    assert b'id="id_allowed_ips_error"' in answer.content


def test_an_untouched_expiry_keeps_its_seconds(acme: Party) -> None:
    until = timezone.now() + dt.timedelta(days=3, seconds=7)
    with tenant_scope(acme.tenant.id):
        ApiKey.objects.filter(pk=acme.api_key.pk).update(expires_at=until)
    path = f"/console/keys/{acme.api_key.public_id}/edit"
    form = {"name": "x", "scopes": ["read"], "expires_at": f"{until:%Y-%m-%dT%H:%M}"}
    assert browser_of(acme.owner).post(path, form).status_code == 302
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.get(pk=acme.api_key.pk).expires_at == until
