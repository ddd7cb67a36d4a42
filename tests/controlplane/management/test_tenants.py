"""/api/v1/keys, for each role and for strangers."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth, services
from controlplane.tenants.models import Role
from tests.controlplane.conftest import Party, as_key, as_user, assert_error

KEYS = "/api/v1/keys"


def test_made_key_opens_and_is_shown_once(acme: Party) -> None:
    client = as_user(acme.owner)
    made = client.post(KEYS, {"name": "ci"}, format="json")
    assert made.status_code == 201
    text = made.json()["key"]
    assert auth.authenticate(f"Bearer {text}").tenant == acme.tenant
    listed = client.get(KEYS)
    assert [row["name"] for row in listed.json()["data"]] == ["ci", "tests"]
    assert text not in listed.content.decode()
    assert listed.json()["data"][0]["last4"] == text[-4:]


def test_revoked_key_no_longer_opens(acme: Party) -> None:
    client = as_user(acme.owner)
    url = f"{KEYS}/{acme.api_key.public_id}/revoke"
    first = client.post(url)
    assert (first.status_code, first.json()["revoked_at"] is None) == (200, False)
    assert client.post(url).json() == first.json()
    assert_error(as_key(acme).get(KEYS), 401)


@pytest.mark.parametrize("role", [Role.DEVELOPER, Role.VIEWER, Role.BILLING])
def test_other_roles_cannot_manage_keys(acme: Party, role: Role) -> None:
    with tenant_scope(acme.tenant.id):
        member = services.member_add(email=f"{role}@acme.example", role=role)
    client = as_user(member.user)
    assert client.get(KEYS).status_code == 200
    assert_error(client.post(KEYS, {"name": "x"}, format="json"), 403)
    assert_error(client.post(f"{KEYS}/{acme.api_key.public_id}/revoke"), 403)


def test_a_key_cannot_make_keys(acme: Party) -> None:
    assert_error(as_key(acme).post(KEYS, {"name": "x"}, format="json"), 403)


def test_stranger_cannot_revoke(acme: Party, globex: Party) -> None:
    client = as_user(globex.owner)
    theirs = client.post(f"{KEYS}/{acme.api_key.public_id}/revoke")
    missing = client.post(f"{KEYS}/{'0' * 22}/revoke")
    assert (theirs.status_code, theirs.content) == (404, missing.content)
    assert auth.authenticate(acme.header)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": 1, "scopes": []}, "scopes"),
        ({"name": "x", "expires_at": "soon"}, "expires_at"),
        ({"name": "x", "expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"name": "a\0b"}, "name"),
    ],
    ids=str,
)
def test_bad_fields_are_named(acme: Party, body: dict[str, Any], param: str) -> None:
    assert_error(as_user(acme.owner).post(KEYS, body, format="json"), 400, param)


@pytest.mark.parametrize("public_id", ["%00", "a%20b", "x" * 500, "٣"])
def test_odd_ids_are_missing_keys(acme: Party, public_id: str) -> None:
    assert_error(as_user(acme.owner).post(f"{KEYS}/{public_id}/revoke"), 404)


def test_person_without_a_tenant_is_nobody(db: None) -> None:
    user = services.user_create(email="lonely@example.com", password=None)
    assert_error(as_user(user).get(KEYS), 401)


def test_suspended_tenant_gets_a_403(acme: Party) -> None:
    acme.tenant.status = "suspended"
    acme.tenant.save()
    for client in (as_key(acme), as_user(acme.owner)):
        assert assert_error(client.get(KEYS), 403)["code"] == "tenant_suspended"
