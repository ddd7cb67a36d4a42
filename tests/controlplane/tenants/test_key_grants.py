"""A key never hands on more than it has, in any dimension, neither to itself nor to another."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.errors import AuthenticationFailed
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth, key_grants, key_services
from controlplane.tenants.key_rules import KeyRules, covers_addresses, covers_models
from controlplane.tenants.models import ApiKey, Membership, Role, ServiceAccount
from controlplane.tenants.permissions import Permission
from controlplane.usage.limits.services import budget_set, limits_for, rate_limit_set
from tests.controlplane.conftest import Party, as_user, assert_error, make_party
from tests.controlplane.tenants.test_key_rules import KEYS, client_of, make

SOON = (timezone.now() + dt.timedelta(days=7)).replace(microsecond=0)
LATER = SOON + dt.timedelta(days=1)
BOUND: dict[str, Any] = {
    "scopes": ["keys:manage", "members:manage", "limits:manage", "read", "infer"],
    "allowed_models": ["invoices", "letters@3"],
    "allowed_ips": ["127.0.0.0/8"],
    "expires_at": SOON.isoformat(),
}
#: By the field that the refusal names, what is more than a bound key has.
MORE = [
    ("scopes", ["audit:read"]),
    ("allowed_models", []),
    ("allowed_models", ["invoices", "others"]),
    ("allowed_models", ["letters"]),
    ("allowed_ips", []),
    ("allowed_ips", ["127.0.0.1", "0.0.0.0/0"]),
    ("allowed_ips", ["::/0"]),
    ("expires_at", None),
    ("expires_at", LATER.isoformat()),
]


@pytest.mark.parametrize(
    ("allowed", "wanted", "is_covered"),
    [
        ((), (), True),
        (("a",), (), False),
        (("a",), ("a@2", "a"), True),
        (("a@2",), ("a",), False),
        (("a", "b"), ("b", "c"), False),
    ],
)
def test_models_that_a_list_covers(allowed: Any, wanted: Any, is_covered: bool) -> None:
    assert covers_models(allowed, wanted) is is_covered


@pytest.mark.parametrize(
    ("allowed", "wanted", "is_covered"),
    [
        ((), (), True),
        (("10.0.0.0/8",), (), False),
        (("10.0.0.0/8",), ("10.1.0.0/16", "10.2.3.4"), True),
        (("10.0.0.0/9", "10.128.0.0/9"), ("10.0.0.0/8",), True),
        (("10.0.0.0/8",), ("10.0.0.0/7",), False),
        (("10.0.0.0/8",), ("2001:db8::1",), False),
        (("2001:db8::/32", "10.0.0.0/8"), ("2001:db8:1::/48",), True),
    ],
)
def test_addresses_that_networks_cover(allowed: Any, wanted: Any, is_covered: bool) -> None:
    assert covers_addresses(allowed, wanted) is is_covered


@pytest.mark.parametrize(("field", "value"), MORE, ids=str)
def test_no_key_gives_itself_or_a_child_more(acme: Party, field: str, value: Any) -> None:
    own = make(acme, **BOUND)
    client = client_of(own)
    itself = client.patch(f"{KEYS}/{own['public_id']}", {field: value}, format="json")
    assert_error(itself, 403, field)
    child = client.post(KEYS, {"name": "child", field: value}, format="json")
    assert_error(child, 403, field)


def test_a_child_is_recorded_and_has_what_its_maker_has_where_nothing_is_said(acme: Party) -> None:
    own = make(acme, **BOUND)
    child = client_of(own).post(KEYS, {"name": "child"}, format="json").json()
    assert child["parent"] == own["public_id"]
    assert own["parent"] is None
    for field in ("allowed_models", "allowed_ips", "expires_at"):
        assert child[field] == own[field]
    less = {"allowed_models": ["invoices@2"], "expires_at": SOON - dt.timedelta(days=1)}
    assert client_of(own).post(KEYS, {"name": "less", **less}, format="json").status_code == 201


def test_a_key_narrows_itself_and_cannot_widen_again(acme: Party) -> None:
    own = make(acme, **BOUND)
    client, url = client_of(own), f"{KEYS}/{own['public_id']}"
    assert client.patch(url, {"allowed_models": ["invoices"]}, format="json").status_code == 200
    back = client.patch(url, {"allowed_models": BOUND["allowed_models"]}, format="json")
    assert_error(back, 403, "allowed_models")


@pytest.mark.parametrize("field", ["allowed_models", "allowed_ips", "expires_at"])
def test_a_bound_key_takes_over_no_key_that_is_not(acme: Party, field: str) -> None:
    """Else it would read, by a rotation, a secret without its bounds."""
    free = make(acme, scopes=["read"], **{k: BOUND[k] for k in BOUND if k not in ("scopes", field)})
    client = client_of(make(acme, **BOUND))
    url = f"{KEYS}/{free['public_id']}"
    assert_error(client.post(f"{url}/rotate", {}, format="json"), 403, field)
    assert_error(client.patch(url, {"name": "mine"}, format="json"), 403, field)


def test_a_bound_key_ends_and_limits_itself_and_what_it_made_and_nothing_else(acme: Party) -> None:
    """Else whoever has it takes the others away, or lifts what bounds it with the whole tenant."""
    free, own = make(acme, scopes=["read"]), make(acme, **BOUND)
    client = client_of(own)
    answer = client.post(KEYS, {"name": "child", "scopes": ["read"]}, format="json")
    child = answer.json()
    assert client.post(f"{KEYS}/{free['public_id']}/revoke").status_code == 403
    for body in ({}, {"api_key": free["public_id"]}, {"model": "another"}):
        limits = client.put("/api/v1/limits", {**body, "requests_per_minute": 1}, format="json")
        assert limits.status_code == 403, body
    assert client.put("/api/v1/budgets", {"hard_limit": 10**12}, format="json").status_code == 403
    of_child = {"api_key": child["public_id"], "requests_per_minute": 1}
    assert client.put("/api/v1/limits", of_child, format="json").status_code == 200
    assert client.post(f"{KEYS}/{child['public_id']}/revoke").status_code == 200
    assert client.post(f"{KEYS}/{own['public_id']}/revoke").status_code == 200


def test_a_key_that_nothing_bounds_ends_one_that_can_do_more(acme: Party) -> None:
    free = make(acme, scopes=["infer", "read"])
    client = client_of(make(acme, scopes=["keys:manage"]))
    assert client.post(f"{KEYS}/{free['public_id']}/revoke").status_code == 200


def test_a_rotation_compares_what_is_stored_not_what_the_role_leaves(acme: Party) -> None:
    """The role may be raised again, and the secret is known."""
    with tenant_scope(acme.tenant.id):
        account = ServiceAccount.objects.create(name="robot", role=Role.DEVELOPER)
        rules = KeyRules(scopes=("read", "tenant:manage"))
        strong, _ = key_services.api_key_create(name="strong", owner=account, rules=rules)
    weak = client_of(make(acme, scopes=["keys:manage", "read"]))
    url = f"{KEYS}/{strong.public_id}"
    assert_error(weak.post(f"{url}/rotate", {}, format="json"), 403, "scopes")
    assert_error(weak.patch(url, {"name": "mine"}, format="json"), 403, "scopes")
    with tenant_scope(acme.tenant.id):
        admin = Membership.objects.get(user=acme.viewer)
        admin.role = Role.ADMIN
        admin.save()
    assert_error(as_user(acme.viewer).post(f"{url}/rotate", {}, format="json"), 403, "scopes")
    assert as_user(acme.owner).post(f"{url}/rotate", {}, format="json").status_code == 200


class TestLimits:
    def test_limits_of_a_key_hold_for_what_it_makes(self, acme: Party) -> None:
        own = make(acme, scopes=BOUND["scopes"])
        with tenant_scope(acme.tenant.id):
            row = key_services.api_key_get(public_id=own["public_id"])
            rate_limit_set(api_key_id=row.pk, requests_per_minute=3)
            budget_set(api_key_id=row.pk, hard_limit=100)
        child = client_of(own).post(KEYS, {"name": "child"}, format="json").json()
        grandchild_maker = {"name": "g", "scopes": ["keys:manage", "infer"]}
        maker = client_of(own).post(KEYS, grandchild_maker, format="json").json()
        grandchild = client_of(maker).post(KEYS, {"name": "gg"}, format="json").json()
        with tenant_scope(acme.tenant.id):
            for made in (own, child, grandchild):
                found = limits_for(key_services.api_key_get(public_id=made["public_id"]), ["m"])
                assert [policy.requests_per_minute for policy in found.policies] == [3]
                assert [budget.hard_limit for budget in found.budgets] == [100]

    def test_no_key_lifts_its_own_limits_or_its_makers(self, acme: Party) -> None:
        own = make(acme, scopes=BOUND["scopes"])
        child = client_of(own).post(
            KEYS, {"name": "child", "scopes": BOUND["scopes"]}, format="json"
        )
        with tenant_scope(acme.tenant.id):
            row = key_services.api_key_get(public_id=own["public_id"])
            limit = rate_limit_set(api_key_id=row.pk, requests_per_minute=3)
            budget = budget_set(api_key_id=row.pk, hard_limit=100)
        for client in (client_of(own), client_of(child.json())):
            body = {"api_key": own["public_id"]}
            more = client.put("/api/v1/limits", {**body, "max_waiting": 9}, format="json")
            assert_error(more, 403, "api_key")
            more = client.put("/api/v1/budgets", {**body, "hard_limit": 10**6}, format="json")
            assert_error(more, 403, "api_key")
            assert_error(client.delete(f"/api/v1/limits/{limit.pk}"), 403)
            assert_error(client.delete(f"/api/v1/budgets/{budget.pk}"), 403)
        body = {"api_key": child.json()["public_id"], "max_waiting": 9}
        assert client_of(own).put("/api/v1/limits", body, format="json").status_code == 200

    def test_a_limited_key_takes_over_no_unlimited_one(self, acme: Party) -> None:
        own, other = make(acme, scopes=BOUND["scopes"]), make(acme, scopes=["infer"])
        child = client_of(own).post(KEYS, {"name": "child"}, format="json").json()
        with tenant_scope(acme.tenant.id):
            row = key_services.api_key_get(public_id=own["public_id"])
            rate_limit_set(api_key_id=row.pk, requests_per_minute=3)
        client = client_of(own)
        assert_error(client.post(f"{KEYS}/{other['public_id']}/rotate", {}, format="json"), 403)
        for mine in (own, child):
            answer = client.post(f"{KEYS}/{mine['public_id']}/rotate", {}, format="json")
            assert answer.status_code == 200


@pytest.mark.parametrize("field", ["allowed_models", "allowed_ips", "expires_at"])
def test_a_bound_key_makes_nobody_a_member(acme: Party, field: str) -> None:
    """A person has no such bounds, and could make a key without them."""
    own = make(acme, scopes=["members:manage", "read", "usage:read", "requests:read"])
    client = client_of(own)
    body = {"email": "mallory@example.com", "role": "viewer"}
    assert client.post("/api/v1/invites", body, format="json").status_code == 201
    url = f"{KEYS}/{own['public_id']}"
    assert as_user(acme.owner).patch(url, {field: BOUND[field]}, format="json").status_code == 200
    auth._keys.forget(*auth._keys.keys())
    other = {**body, "email": "another@example.com"}
    assert_error(client.post("/api/v1/invites", other, format="json"), 403)


class TestTheirEnd:
    def test_revoking_takes_along_all_that_come_from_a_key(self, acme: Party) -> None:
        own, child, grandchild = _line(acme)
        answer = as_user(acme.owner).post(f"{KEYS}/{own['public_id']}/revoke")
        assert answer.status_code == 200
        for made in (own, child, grandchild):
            with pytest.raises(AuthenticationFailed, match="revoked"):
                auth.authenticate(f"Bearer {made['key']}")
        assert auth.authenticate(acme.header)

    def test_it_leaves_them_where_that_is_said_and_takes_them_later(self, acme: Party) -> None:
        own, child, _ = _line(acme)
        client, url = as_user(acme.owner), f"{KEYS}/{own['public_id']}/revoke"
        assert client.post(url, {"children": False}, format="json").status_code == 200
        assert auth.authenticate(f"Bearer {child['key']}", "127.0.0.1")
        assert client.post(url, {}, format="json").status_code == 200
        with pytest.raises(AuthenticationFailed, match="revoked"):
            auth.authenticate(f"Bearer {child['key']}")

    def test_an_earlier_end_is_theirs_too(self, acme: Party) -> None:
        own, child, grandchild = _line(acme)
        end = timezone.now() + dt.timedelta(seconds=60)
        answer = as_user(acme.owner).patch(
            f"{KEYS}/{own['public_id']}", {"expires_at": end}, format="json"
        )
        assert answer.status_code == 200
        with tenant_scope(acme.tenant.id):
            for made in (child, grandchild):
                assert key_services.api_key_get(public_id=made["public_id"]).expires_at == end

    def test_a_line_of_keys_has_an_end(self, acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(key_grants, "MAX_ANCESTORS", 2)
        _, _, grandchild = _line(acme)
        assert_error(client_of(grandchild).post(KEYS, {"name": "x"}, format="json"), 409)

    def test_the_console_asks_whether_they_go_along(self, acme: Party) -> None:
        own, child, _ = _line(acme)
        client = APIClient()
        client.force_login(acme.owner)
        url = f"/console/keys/{own['public_id']}/revoke"
        page = client.get(url).content.decode()
        assert child["name"] in page
        assert 'name="children" checked' in page
        client.post(url, {"asked": "1"})
        assert auth.authenticate(f"Bearer {child['key']}")
        client.post(url, {"asked": "1", "children": "on"})
        with pytest.raises(AuthenticationFailed, match="revoked"):
            auth.authenticate(f"Bearer {child['key']}")


@pytest.mark.django_db(transaction=True)
def test_no_child_slips_through_while_its_maker_is_revoked() -> None:
    """Its maker's key was looked at before; what counts is the moment when it is made."""
    acme = make_party("acme")
    own = make(acme, scopes=["keys:manage", "infer"])
    by = auth.authenticate(f"Bearer {own['key']}")
    outcomes: list[str] = []
    start = threading.Barrier(5)

    def bear() -> None:
        with tenant_scope(acme.tenant.id):
            start.wait()
            for number in range(10):
                try:
                    rules = KeyRules(scopes=("infer",))
                    key_services.api_key_create(name=f"child {number}", by=by, rules=rules)
                    outcomes.append("made")
                except AuthenticationFailed:
                    outcomes.append("refused")
        connection.close()

    threads = [threading.Thread(target=bear) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    with tenant_scope(acme.tenant.id):
        while "made" not in outcomes:
            pass
        key_services.api_key_revoke(public_id=own["public_id"])
    for thread in threads:
        thread.join()
    with tenant_scope(acme.tenant.id):
        assert not ApiKey.objects.filter(parent__public_id=own["public_id"], revoked_at=None)
    assert len(outcomes) == 40
    assert "refused" in outcomes


def test_keys_from_before_go_on(acme: Party) -> None:
    """They come from none, and nothing bounds them but what did."""
    with tenant_scope(acme.tenant.id):
        row = ApiKey.objects.get(pk=acme.api_key.pk)
        assert (row.parent, row.ancestors, row.line) == (None, [], [row.pk])
        assert limits_for(row, ["m"]).policies == ()
    assert auth.authenticate(acme.header).permissions >= {Permission.INFER}


def _line(acme: Party) -> tuple[Any, Any, Any]:
    """A key, one that it made, and one that that one made."""
    rules = {"scopes": ["keys:manage", "infer"]}
    own = make(acme, **rules)
    child = client_of(own).post(KEYS, {"name": "the child", **rules}, format="json").json()
    grandchild = client_of(child).post(KEYS, {"name": "third", **rules}, format="json").json()
    return own, child, grandchild
