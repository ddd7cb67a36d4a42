"""Who gets in with a key or a session, and who no longer does."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser
from django.db import connection
from django.test import RequestFactory
from django.utils import timezone

from controlplane.errors import AuthenticationFailed, PermissionDenied
from controlplane.tenancy.scoping import (
    TenantScopeError,
    all_tenants,
    current_tenant_id,
    tenant_scope,
)
from controlplane.tenants import auth, keys, services
from controlplane.tenants.models import ApiKey, Role, Tenant
from tests.controlplane.conftest import Party


def change_key(party: Party, **fields: Any) -> None:
    with all_tenants(reason="test"):
        ApiKey.objects.filter(pk=party.api_key.pk).update(**fields)


def test_key_gives_its_tenant(acme: Party, globex: Party) -> None:
    principal = auth.authenticate(acme.header)
    assert principal.tenant == acme.tenant
    assert principal.api_key == acme.api_key
    assert principal.role is Role.DEVELOPER


def test_authentication_leaves_no_scope(acme: Party) -> None:
    auth.authenticate(acme.header)
    with pytest.raises(TenantScopeError):
        current_tenant_id()


def test_scheme_is_case_insensitive(acme: Party) -> None:
    assert auth.authenticate(f"bearer {acme.key_text}").tenant == acme.tenant


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer nonsense", "Basic YTpi", "Bearer " + "é" * 79],
    ids=["none", "empty", "no key", "blank", "nonsense", "basic", "not ascii"],
)
def test_malformed_header_costs_no_query(
    db: None, header: str | None, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0), pytest.raises(AuthenticationFailed):
        auth.authenticate(header)


def test_wrong_checksum_costs_no_query(acme: Party, django_assert_num_queries: Any) -> None:
    last = "A" if acme.key_text[-1] != "A" else "B"
    with django_assert_num_queries(0), pytest.raises(AuthenticationFailed):
        auth.authenticate(acme.header[:-1] + last)


def test_unknown_key_and_wrong_secret_look_the_same(acme: Party) -> None:
    unknown = keys.generate()
    wrong_secret = keys.KeyParts(acme.api_key.public_id, unknown.secret)
    bodies = []
    for parts in (unknown, wrong_secret):
        with pytest.raises(AuthenticationFailed) as caught:
            auth.authenticate(f"Bearer {parts.text()}")
        bodies.append(caught.value.response().content)
    assert bodies[0] == bodies[1]


def test_revoked_key_is_refused(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        services.api_key_revoke(public_id=acme.api_key.public_id)
    with pytest.raises(AuthenticationFailed, match="revoked"):
        auth.authenticate(acme.header)


def test_expired_key_is_refused(acme: Party) -> None:
    change_key(acme, expires_at=timezone.now() + dt.timedelta(minutes=1))
    auth.authenticate(acme.header)
    change_key(acme, expires_at=timezone.now())
    with pytest.raises(AuthenticationFailed, match="expired"):
        auth.authenticate(acme.header)


def test_suspended_tenant_is_refused(acme: Party, globex: Party) -> None:
    Tenant.objects.filter(pk=acme.tenant.pk).update(status=Tenant.Status.SUSPENDED)
    with pytest.raises(PermissionDenied) as caught:
        auth.authenticate(acme.header)
    assert caught.value.code == "tenant_suspended"
    assert auth.authenticate(globex.header).tenant == globex.tenant


def test_no_secret_in_the_database(acme: Party) -> None:
    parts = keys.parse(acme.key_text)
    assert parts is not None
    with all_tenants(reason="test"), connection.cursor() as cursor:
        cursor.execute("select row_to_json(k)::text from tenants_apikey k")
        stored = " ".join(row[0] for row in cursor.fetchall())
    assert parts.public_id in stored
    assert parts.secret not in stored
    assert parts.secret.encode().hex() not in stored


def test_last_use_is_written_once_a_minute(acme: Party, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(2):
        auth.authenticate(acme.header)
    with django_assert_num_queries(1):
        auth.authenticate(acme.header)
    long_ago = timezone.now() - dt.timedelta(minutes=2)
    change_key(acme, last_used_at=long_ago)
    auth.authenticate(acme.header)
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.get().last_used_at > long_ago


find_principal = async_to_sync(auth.find_principal)


class TestCache:
    def test_spares_the_query_for_a_moment(
        self, acme: Party, django_assert_num_queries: Any
    ) -> None:
        with django_assert_num_queries(1):
            assert find_principal(acme.header).tenant == acme.tenant
        with django_assert_num_queries(0):
            assert find_principal(acme.header).tenant == acme.tenant

    def test_still_needs_the_secret(self, acme: Party) -> None:
        auth.authenticate(acme.header)
        forged = keys.KeyParts(acme.api_key.public_id, keys.generate().secret)
        with pytest.raises(AuthenticationFailed):
            find_principal(f"Bearer {forged.text()}")

    def test_still_sees_a_key_expire(self, acme: Party) -> None:
        change_key(acme, expires_at=timezone.now() + dt.timedelta(milliseconds=100))
        auth.authenticate(acme.header)
        time.sleep(0.15)
        with pytest.raises(AuthenticationFailed, match="expired"):
            find_principal(acme.header)

    def test_does_not_keep_a_refusal(self, acme: Party) -> None:
        with pytest.raises(AuthenticationFailed):
            auth.authenticate(f"Bearer {keys.generate().text()}")
        assert auth._keys.keys() == []

    def test_revocation_by_another_process_holds_within_a_second(self, acme: Party) -> None:
        auth.authenticate(acme.header)
        change_key(acme, revoked_at=timezone.now())
        time.sleep(0.9)
        with pytest.raises(AuthenticationFailed, match="revoked"):
            find_principal(acme.header)

    def test_revocation_here_holds_at_once(self, acme: Party) -> None:
        auth.authenticate(acme.header)
        with tenant_scope(acme.tenant.id):
            services.api_key_revoke(public_id=acme.api_key.public_id)
        with pytest.raises(AuthenticationFailed, match="revoked"):
            find_principal(acme.header)

    def test_is_bounded(self, acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth._keys, "max_entries", 3)
        with tenant_scope(acme.tenant.id):
            texts = [services.api_key_create(name=str(n))[1] for n in range(5)]
        for text in texts:
            auth.authenticate(f"Bearer {text}")
        assert len(auth._keys.keys()) == 3


class TestSession:
    @staticmethod
    def request(user: Any, **session: Any) -> Any:
        request = RequestFactory().get("/")
        request.user = user
        request.session = session  # type: ignore[assignment]
        return request

    def test_member_works_for_their_tenant(self, acme: Party, globex: Party) -> None:
        principal = auth.session_principal(self.request(acme.viewer))
        assert principal is not None
        assert (principal.tenant, principal.role) == (acme.tenant, Role.VIEWER)

    def test_session_chooses_among_memberships(self, acme: Party, globex: Party) -> None:
        with tenant_scope(globex.tenant.id):
            services.member_add(email=acme.owner.email, role=Role.BILLING)
        request = self.request(acme.owner, tenant_id=str(globex.tenant.id))
        principal = auth.session_principal(request)
        assert principal is not None
        assert (principal.tenant, principal.role) == (globex.tenant, Role.BILLING)

    def test_session_cannot_choose_a_stranger(self, acme: Party, globex: Party) -> None:
        request = self.request(acme.owner, tenant_id=str(globex.tenant.id))
        assert auth.session_principal(request) is None

    def test_anonymous_and_deactivated_are_nobody(self, acme: Party) -> None:
        acme.owner.is_active = False
        assert auth.session_principal(self.request(AnonymousUser())) is None
        assert auth.session_principal(self.request(acme.owner)) is None

    def test_suspended_tenant_is_refused(self, acme: Party) -> None:
        Tenant.objects.filter(pk=acme.tenant.pk).update(status=Tenant.Status.SUSPENDED)
        with pytest.raises(PermissionDenied):
            auth.session_principal(self.request(acme.owner))


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.OWNER, set(auth.Permission)),
        (Role.ADMIN, set(auth.Permission) - {"tenant:manage"}),
        (
            Role.DEVELOPER,
            {
                *("read", "infer", "adapters:write", "training:write"),
                *("files:read", "files:write", "batches:read", "batches:write"),
                *("usage:read", "requests:read"),
            },
        ),
        (Role.VIEWER, {"read", "usage:read", "requests:read"}),
        (Role.BILLING, {"read", "usage:read", "limits:manage"}),
    ],
)
def test_roles(role: Role, allowed: set[str]) -> None:
    principal = auth.Principal(tenant=Tenant(), role=role)
    for permission in auth.Permission:
        if permission in allowed:
            auth.authorize(principal, permission)
        else:
            with pytest.raises(PermissionDenied):
                auth.authorize(principal, permission)


def test_every_role_is_decided() -> None:
    assert set(auth.PERMISSIONS) == set(Role)
