"""Members, invites and service accounts: who may do what to whom."""

from __future__ import annotations

import datetime as dt
import re
import threading
import time
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client
from django.utils import timezone

from controlplane.errors import AuthenticationFailed, NotFound, PermissionDenied
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth, key_services, people, services
from controlplane.tenants.models import Invite, Membership, Role, User
from controlplane.tenants.roles import PERMISSIONS
from tests.controlplane.conftest import PASSWORD, Party, as_user, assert_error, make_party
from tests.controlplane.management.test_openapi import DOCUMENT

INVITES, ACCOUNTS, MEMBERS = "/api/v1/invites", "/api/v1/service-accounts", "/api/v1/members"


def invite(party: Party, **fields: Any) -> Any:
    body = {"email": "new@acme.example", "role": "developer", **fields}
    answer = as_user(party.owner).post(INVITES, body, format="json")
    assert answer.status_code == 201, answer.json()
    return answer.json()


def path_of(invited: Any) -> str:
    return "/console/invites/" + invited["url"].rpartition("/")[2]


def add(party: Party, role: Role, name: str = "") -> Membership:
    with tenant_scope(party.tenant.id):
        return services.member_add(email=f"{name or role.value}@more.example", role=role)


class TestInvites:
    def test_new_person_chooses_a_password_and_is_in(self, acme: Party) -> None:
        invited = invite(acme)
        browser = Client()
        assert b"Choose one, or enter yours" in browser.get(path_of(invited)).content
        answer = browser.post(path_of(invited), {"password": PASSWORD})
        assert (answer.status_code, answer["Location"]) == (302, "/console/")
        with tenant_scope(acme.tenant.id):
            member = Membership.objects.get(user__email="new@acme.example")
        assert member.role == Role.DEVELOPER
        assert browser.get("/console/").status_code == 200
        assert browser.login(username="new@acme.example", password=PASSWORD)
        listed = as_user(acme.owner).get(INVITES).json()["data"]
        assert [row["status"] for row in listed] == ["accepted"]

    def test_works_once(self, acme: Party) -> None:
        invited = invite(acme)
        Client().post(path_of(invited), {"password": PASSWORD})
        assert Client().get(path_of(invited)).status_code == 404
        assert Client().post(path_of(invited), {"password": PASSWORD}).status_code == 404

    def test_opening_it_changes_nothing(self, acme: Party) -> None:
        invited = invite(acme)
        for _ in range(2):
            assert Client().get(path_of(invited)).status_code == 200
        assert not User.objects.filter(email="new@acme.example").exists()

    def test_weak_password_is_refused_and_the_invite_stays(self, acme: Party) -> None:
        invited = invite(acme)
        assert Client().post(path_of(invited), {"password": "password"}).status_code == 422
        assert Client().get(path_of(invited)).status_code == 200

    def test_known_person_has_to_sign_in(self, acme: Party, globex: Party) -> None:
        invited = invite(acme, email=globex.owner.email)
        stranger = Client()
        assert b"Sign in first" in stranger.get(path_of(invited)).content
        refused = stranger.post(path_of(invited), {"password": "their new password!"})
        assert refused.status_code == 422
        globex.owner.refresh_from_db()
        assert globex.owner.check_password(PASSWORD)
        browser = Client()
        browser.force_login(globex.owner)
        assert browser.post(path_of(invited)).status_code == 302
        with tenant_scope(acme.tenant.id):
            assert Membership.objects.filter(user=globex.owner).exists()

    def test_another_person_cannot_use_it(self, acme: Party, globex: Party) -> None:
        invited = invite(acme)
        browser = Client()
        browser.force_login(globex.owner)
        assert b"Sign out" in browser.get(path_of(invited)).content
        browser.post(path_of(invited))
        token = invited["url"].rpartition("/")[2]
        with pytest.raises(NotFound):
            people.invite_accept(token=token, user=globex.owner)

    def test_revoked_and_expired_and_wrong_look_the_same(self, acme: Party) -> None:
        revoked = invite(acme, email="a@acme.example")
        as_user(acme.owner).post(f"{INVITES}/{revoked['id']}/revoke")
        late = invite(acme, email="b@acme.example")
        with tenant_scope(acme.tenant.id):
            Invite.objects.filter(pk=late["id"]).update(expires_at=timezone.now())
        pages = [
            Client().get(path)
            for path in (path_of(revoked), path_of(late), "/console/invites/nonsense")
        ]
        assert {page.status_code for page in pages} == {404}
        # But for the token against forged forms, which is new with every page.
        assert len({re.sub(rb"\w{64}", b"", page.content) for page in pages}) == 1

    def test_lasts_seven_days_and_keeps_no_token(self, acme: Party) -> None:
        invited = invite(acme)
        with tenant_scope(acme.tenant.id):
            row = Invite.objects.get()
        lifetime = row.expires_at - row.created_at
        assert abs(lifetime - dt.timedelta(days=7)) < dt.timedelta(seconds=5)
        assert invited["url"].rpartition("/")[2] not in str(vars(row))

    def test_members_and_invited_are_not_invited_again(self, acme: Party) -> None:
        invite(acme)
        client = as_user(acme.owner)
        for email in ("NEW@acme.example", acme.viewer.email):
            body = {"email": email, "role": "viewer"}
            assert_error(client.post(INVITES, body, format="json"), 409, "email")


class TestRanks:
    def test_admin_makes_no_owner_and_touches_none(self, acme: Party) -> None:
        client = as_user(add(acme, Role.ADMIN).user)
        body = {"email": "x@acme.example", "role": "owner"}
        assert_error(client.post(INVITES, body, format="json"), 403)
        assert_error(client.post(ACCOUNTS, {"name": "x", "role": "owner"}, format="json"), 403)
        with tenant_scope(acme.tenant.id):
            owner, viewer = (Membership.objects.get(user=u) for u in (acme.owner, acme.viewer))
        assert_error(client.delete(f"{MEMBERS}/{owner.pk}"), 403)
        assert_error(client.patch(f"{MEMBERS}/{owner.pk}", {"role": "viewer"}, format="json"), 403)
        assert_error(client.patch(f"{MEMBERS}/{viewer.pk}", {"role": "owner"}, format="json"), 403)
        changed = client.patch(f"{MEMBERS}/{viewer.pk}", {"role": "billing"}, format="json")
        assert changed.json()["role"] == "billing"

    def test_a_tenant_keeps_an_owner(self, acme: Party) -> None:
        client = as_user(acme.owner)
        with tenant_scope(acme.tenant.id):
            owner = Membership.objects.get(user=acme.owner)
        assert_error(client.delete(f"{MEMBERS}/{owner.pk}"), 409)
        assert_error(client.patch(f"{MEMBERS}/{owner.pk}", {"role": "admin"}, format="json"), 409)
        add(acme, Role.OWNER)
        assert client.delete(f"{MEMBERS}/{owner.pk}").status_code == 204

    def test_a_closed_account_is_no_other_owner(self, acme: Party) -> None:
        client, closed = as_user(acme.owner), add(acme, Role.OWNER).user
        User.objects.filter(pk=closed.pk).update(is_active=False)
        with tenant_scope(acme.tenant.id):
            owner = Membership.objects.get(user=acme.owner)
        assert_error(client.delete(f"{MEMBERS}/{owner.pk}"), 409)

    def test_a_tenant_without_an_owner_keeps_an_admin(self, acme: Party) -> None:
        """As the operator may have made it."""
        admin = add(acme, Role.ADMIN)
        with tenant_scope(acme.tenant.id):
            Membership.objects.filter(role=Role.OWNER).update(role=Role.DEVELOPER)
        client = as_user(admin.user)
        for role in (Role.DEVELOPER, Role.VIEWER, Role.BILLING):
            error = assert_error(
                client.patch(f"{MEMBERS}/{admin.pk}", {"role": role}, format="json"), 409
            )
            assert "Make another member an admin first" in error["message"]
        assert_error(client.delete(f"{MEMBERS}/{admin.pk}"), 409)
        other = add(acme, Role.ADMIN, "second")
        changed = client.patch(f"{MEMBERS}/{admin.pk}", {"role": "viewer"}, format="json")
        assert changed.json()["role"] == "viewer"
        assert_error(as_user(other.user).delete(f"{MEMBERS}/{other.pk}"), 409)


class TestServiceAccounts:
    def test_its_key_outlives_whoever_made_it_and_ends_with_it(self, acme: Party) -> None:
        admin = add(acme, Role.ADMIN)
        account = as_user(admin.user).post(ACCOUNTS, {"name": "ci"}, format="json").json()
        body = {"name": "ci", "service_account": account["id"]}
        key = as_user(admin.user).post("/api/v1/keys", body, format="json").json()["key"]
        client = as_user(acme.owner)
        assert client.delete(f"{MEMBERS}/{admin.pk}").status_code == 204
        assert auth.authenticate(f"Bearer {key}").role is Role.DEVELOPER
        url = f"{ACCOUNTS}/{account['id']}"
        assert client.patch(url, {"role": "viewer"}, format="json").json()["role"] == "viewer"
        assert auth.authenticate(f"Bearer {key}").role is Role.VIEWER
        assert client.delete(url).status_code == 204
        with pytest.raises(AuthenticationFailed):
            auth.authenticate(f"Bearer {key}")

    def test_anothers_account_owns_no_key_of_ours(self, acme: Party, globex: Party) -> None:
        theirs = as_user(globex.owner).post(ACCOUNTS, {"name": "ci"}, format="json").json()
        body = {"name": "x", "service_account": theirs["id"]}
        client = as_user(acme.owner)
        assert_error(client.post("/api/v1/keys", body, format="json"), 404, "service_account")


#: What each role may write, of what it may not read nothing is left out: every write is here.
WRITES = [
    (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method in ("put", "post", "patch", "delete")
    if method in item and path.startswith("/api/v1/")
]


def needed(method: str, path: str) -> auth.Permission:
    """The permission a write needs, from its address alone: a second opinion to the views'."""
    first = path.removeprefix("/api/v1/").split("/")[0]
    if path.endswith(("/schedule", "/schedule/run")) or first in ("datasets", "training-runs"):
        return auth.Permission.TRAINING_WRITE
    return {
        "suites": auth.Permission.TRAINING_WRITE,
        "judges": auth.Permission.TRAINING_WRITE,
        "evaluations": auth.Permission.INFER,
        "adapters": auth.Permission.ADAPTERS_WRITE,
        "aliases": auth.Permission.ADAPTERS_WRITE,
        "keys": auth.Permission.KEYS_MANAGE,
        "members": auth.Permission.MEMBERS_MANAGE,
        "invites": auth.Permission.MEMBERS_MANAGE,
        "service-accounts": auth.Permission.MEMBERS_MANAGE,
        "tenant": auth.Permission.TENANT_MANAGE,
        "limits": auth.Permission.LIMITS_MANAGE,
        "budgets": auth.Permission.LIMITS_MANAGE,
        "webhooks": auth.Permission.WEBHOOKS_MANAGE,
        "requests": auth.Permission.REQUESTS_CONTENT,
        "request-log": auth.Permission.TENANT_MANAGE,
        "capture": auth.Permission.TENANT_MANAGE,
        "captured-requests": auth.Permission.REQUESTS_CONTENT,
        "schemas": auth.Permission.READ,  # linting one changes nothing
    }[first]


@pytest.mark.parametrize("role", Role)
def test_every_write_asks_for_its_permission(acme: Party, role: Role) -> None:
    client = as_user(add(acme, role).user)
    nobody = "00000000-0000-0000-0000-000000000000"
    for method, path in WRITES:
        url = path
        for name in (
            "member_id",
            "invite_id",
            "account_id",
            "run_id",
            "evaluation_id",
            "limit_id",
            "budget_id",
            "webhook_id",
            "delivery_id",
        ):
            url = url.replace(f"{{{name}}}", nobody)
        url = url.replace("{number}", "1").replace("{name}", "x").replace("{public_id}", "x")
        permission = needed(method, path)
        answer = getattr(client, method)(url, {}, format="json")
        refused = (
            answer.status_code == 403 and permission.value in answer.json()["error"]["message"]
        )
        assert refused is (permission not in PERMISSIONS[role]), (method, path)


def test_key_made_by_a_service_has_no_owner(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        key, _ = key_services.api_key_create(name="x")
    assert (key.owner, key.service_account) == (None, None)


@pytest.mark.django_db(transaction=True)
def test_a_role_set_at_the_same_moment_leaves_an_owner() -> None:
    """An admin demotes a developer, who in the same moment becomes the one owner."""
    acme = make_party("acme")
    admin, developer = add(acme, Role.ADMIN), add(acme, Role.DEVELOPER)
    with tenant_scope(acme.tenant.id):
        owner = Membership.objects.get(user=acme.owner)
    by_owner, by_admin = (
        auth.Principal(tenant=acme.tenant, role=Role(m.role), user=m.user, membership=m)
        for m in (owner, admin)
    )
    refused: list[bool] = []

    def demote() -> None:
        try:
            with tenant_scope(acme.tenant.id):
                people.member_role_set(by=by_admin, member_id=developer.pk, role=Role.VIEWER)
        except PermissionDenied:
            refused.append(True)
        finally:
            connection.close()

    thread = threading.Thread(target=demote)
    with tenant_scope(acme.tenant.id), transaction.atomic():
        people.member_role_set(by=by_owner, member_id=developer.pk, role=Role.OWNER)
        people.member_role_set(by=by_owner, member_id=owner.pk, role=Role.VIEWER)
        thread.start()
        await_a_waiting_lock()
    thread.join(timeout=20)
    assert refused == [True]
    with tenant_scope(acme.tenant.id):
        assert Membership.objects.get(role=Role.OWNER).pk == developer.pk


def await_a_waiting_lock() -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from pg_locks where not granted")
            if cursor.fetchone()[0]:
                return
        time.sleep(0.02)
    raise AssertionError("nobody waits")
