"""What a key is good for, and what its rotation and its owner's end do to it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.errors import AuthenticationFailed, InvalidRequest, PermissionDenied
from controlplane.tenancy.model_scope import allows_model
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth, key_services, services
from controlplane.tenants.key_rules import KeyRules, allows_address
from controlplane.tenants.models import ApiKey, Role, User
from controlplane.tenants.permissions import DEFAULT_SCOPES
from tests.controlplane.conftest import Party, as_user, assert_error

KEYS = "/api/v1/keys"


def make(party: Party, **body: Any) -> Any:
    answer = as_user(party.owner).post(KEYS, {"name": "made", **body}, format="json")
    assert answer.status_code == 201, answer.json()
    return answer.json()


def client_of(made: Any, **extra: Any) -> Any:
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {made['key']}", **extra)
    return client


@pytest.mark.parametrize(
    ("allowed", "name", "is_allowed"),
    [
        ((), "anything", True),
        (("invoices",), "invoices", True),
        (("invoices",), "invoices@3", True),
        (("invoices@3",), "invoices@3", True),
        (("invoices@3",), "invoices", False),
        (("invoices@3",), "invoices@30", False),
        (("invoices",), "invoices-2", False),
    ],
)
def test_allowed_models(allowed: tuple[str, ...], name: str, is_allowed: bool) -> None:
    assert allows_model(allowed, name) is is_allowed


@pytest.mark.parametrize(
    ("allowed", "address", "is_allowed"),
    [
        ((), "", True),
        (("192.0.2.0/24",), "192.0.2.77", True),
        (("192.0.2.0/24",), "::ffff:192.0.2.77", True),
        (("192.0.2.0/24",), "192.0.3.1", False),
        (("2001:db8::/32",), "2001:db8::1", True),
        (("2001:db8::/32",), "192.0.2.1", False),
        (("192.0.2.7/32",), "", False),
        (("192.0.2.7/32",), "nonsense", False),
    ],
)
def test_allowed_addresses(allowed: tuple[str, ...], address: str, is_allowed: bool) -> None:
    assert allows_address(allowed, address) is is_allowed


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        (KeyRules(scopes=()), "scopes"),
        (KeyRules(scopes=("everything",)), "scopes"),
        (KeyRules(allowed_models=("a/b",)), "allowed_models"),
        (KeyRules(allowed_models=("x@0",)), "allowed_models"),
        (KeyRules(allowed_models=tuple(f"m{n}" for n in range(101))), "allowed_models"),
        (KeyRules(allowed_ips=("192.0.2.7/24",)), "allowed_ips"),
        (KeyRules(allowed_ips=("localhost",)), "allowed_ips"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_rules_name_their_field(rules: KeyRules, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rules.checked()
    assert caught.value.param == param


def test_rules_left_out_are_a_developers(acme: Party) -> None:
    made = make(acme)
    assert made["scopes"] == list(DEFAULT_SCOPES)
    assert (made["allowed_models"], made["allowed_ips"]) == ([], [])
    assert made["environment"] == "live"
    assert make(acme, environment="test")["key"].startswith("lk_test_")


def test_key_does_what_its_scopes_say(acme: Party) -> None:
    client = client_of(make(acme, scopes=["usage:read"]))
    assert client.get("/api/v1/usage").status_code == 200
    assert_error(client.get(KEYS), 403)


def test_scoped_key_can_manage_keys_but_gives_no_more_than_it_has(acme: Party) -> None:
    client = client_of(make(acme, scopes=["keys:manage", "read", "infer"]))
    made = client.post(KEYS, {"name": "next"}, format="json").json()
    assert set(made["scopes"]) == {"read", "infer"}
    greedy = {"name": "x", "scopes": ["members:manage"]}
    assert_error(client.post(KEYS, greedy, format="json"), 403, "scopes")


def test_weak_manager_cannot_take_over_a_strong_key(acme: Party) -> None:
    """Else its rotation would hand out a secret that opens more than the manager may."""
    strong = make(acme, scopes=["tenant:manage"])["public_id"]
    weak = client_of(make(acme, scopes=["keys:manage"]))
    assert_error(weak.post(f"{KEYS}/{strong}/rotate", {}, format="json"), 403, "scopes")
    assert_error(weak.patch(f"{KEYS}/{strong}", {"allowed_ips": []}, format="json"), 403, "scopes")
    assert weak.post(f"{KEYS}/{strong}/revoke").status_code == 200


def test_key_is_held_to_its_addresses(acme: Party) -> None:
    made = make(acme, allowed_ips=["192.0.2.0/24"])
    inside = client_of(made, REMOTE_ADDR="192.0.2.9")
    outside = client_of(made, REMOTE_ADDR="198.51.100.1")
    assert inside.get(KEYS).status_code == 200
    assert assert_error(outside.get(KEYS), 403)["code"] == "address_not_allowed"
    with pytest.raises(PermissionDenied):
        async_to_sync(auth.find_principal)(f"Bearer {made['key']}", "198.51.100.1")


def test_both_secrets_work_until_the_grace_ends(acme: Party) -> None:
    url = f"{KEYS}/{acme.api_key.public_id}/rotate"
    rotated = as_user(acme.owner).post(url, {"grace_seconds": 60}, format="json").json()
    assert rotated["public_id"] == acme.api_key.public_id
    assert rotated["last4"] == rotated["key"][-4:]
    for header in (acme.header, f"Bearer {rotated['key']}"):
        assert auth.authenticate(header).api_key == acme.api_key
    with tenant_scope(acme.tenant.id):
        ApiKey.objects.update(old_secret_until=timezone.now() + dt.timedelta(seconds=-1))
    auth._keys.forget(*auth._keys.keys())
    with pytest.raises(AuthenticationFailed):
        auth.authenticate(acme.header)
    assert auth.authenticate(f"Bearer {rotated['key']}")


def test_rotation_without_grace_and_the_second_rotation_end_the_old_secret(acme: Party) -> None:
    public_id = acme.api_key.public_id
    with tenant_scope(acme.tenant.id):
        _, second = key_services.api_key_rotate(public_id=public_id)
        _, third = key_services.api_key_rotate(public_id=public_id)
        for text in (second, third):
            auth.authenticate(f"Bearer {text}")
        with pytest.raises(AuthenticationFailed):
            auth.authenticate(acme.header)
        _, fourth = key_services.api_key_rotate(public_id=public_id, grace_s=0)
    auth.authenticate(f"Bearer {fourth}")
    with pytest.raises(AuthenticationFailed):
        auth.authenticate(f"Bearer {third}")


def test_revoking_ends_both_secrets(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        _, text = key_services.api_key_rotate(public_id=acme.api_key.public_id)
        key_services.api_key_revoke(public_id=acme.api_key.public_id)
    for header in (acme.header, f"Bearer {text}"):
        with pytest.raises(AuthenticationFailed, match="revoked"):
            auth.authenticate(header)
    url = f"{KEYS}/{acme.api_key.public_id}/rotate"
    assert_error(as_user(acme.owner).post(url, {}, format="json"), 409)


def test_new_secret_is_known_where_the_old_row_is_cached(acme: Party) -> None:
    """Another process rotated the key; this one has not heard of it."""
    auth.authenticate(acme.header)
    cached = auth._keys.kept(acme.api_key.public_id)
    assert cached is not None
    with tenant_scope(acme.tenant.id):
        _, text = key_services.api_key_rotate(public_id=acme.api_key.public_id)
    auth._keys.put(acme.api_key.public_id, cached.value[0], cached.asked)
    assert async_to_sync(auth.find_principal)(f"Bearer {text}").api_key == acme.api_key


def test_a_demoted_owner_weakens_their_keys_and_removal_ends_them(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        member = services.member_add(email="ann@acme.example", role=Role.ADMIN)
        key, text = key_services.api_key_create(name="ann's", owner=member)
    header = f"Bearer {text}"
    auth.authorize(auth.authenticate(header), auth.Permission.ADAPTERS_WRITE)
    with tenant_scope(acme.tenant.id):
        services.member_add(email="ann@acme.example", role=Role.VIEWER)
    with pytest.raises(PermissionDenied):
        auth.authorize(auth.authenticate(header), auth.Permission.ADAPTERS_WRITE)
    url = f"/api/v1/members/{member.pk}"
    assert as_user(acme.owner).delete(url).status_code == 204
    with pytest.raises(AuthenticationFailed, match="revoked"):
        auth.authenticate(header)
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.get(pk=key.pk).owner is None


def test_patch_changes_what_it_names(acme: Party) -> None:
    made = make(acme, allowed_models=["a"], allowed_ips=["192.0.2.7"])
    url = f"{KEYS}/{made['public_id']}"
    client = as_user(acme.owner)
    changed = client.patch(url, {"allowed_models": ["b@2"]}, format="json").json()
    assert changed["allowed_models"] == ["b@2"]
    assert changed["allowed_ips"] == ["192.0.2.7/32"]
    assert client.get(url).json() == changed
    assert_error(client.patch(url, {"scopes": ["no"]}, format="json"), 400, "scopes.0")


def test_a_closed_accounts_keys_are_closed_too(acme: Party) -> None:
    theirs, tenants = make(acme), client_of({"key": acme.key_text})
    client = client_of(theirs)
    assert client.get(KEYS).status_code == 200
    User.objects.filter(pk=acme.owner.pk).update(is_active=False)
    auth._keys.forget(*auth._keys.keys())
    assert_error(client.get(KEYS), 401)
    assert tenants.get(KEYS).status_code == 200
    User.objects.filter(pk=acme.owner.pk).update(is_active=True)
    assert client.get(KEYS).status_code == 200
