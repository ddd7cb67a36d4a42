"""Every page as owner, developer, viewer, stranger, nobody, and a person without a tenant."""

from __future__ import annotations

import re
import uuid

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.models import Membership, Role, Tenant, User
from tests.controlplane.conftest import PASSWORD, Party, make_operator
from tests.controlplane.console.conftest import Belongings, browser_of

#: Pages that every member may read, and those only some roles may open. {run} is acme's run.
READABLE = [
    "/console/",
    "/console/adapters",
    "/console/adapters/invoices",
    "/console/adapters/invoices/versions/1",
    "/console/adapters/invoices/versions/2",
    "/console/adapters/invoices/versions/1/status",
    "/console/keys",
    "/console/training",
    "/console/training/runs/{run}",
    "/console/training/runs/{run}/status",
]
WRITING = ["/console/upload", "/console/adapters/invoices/schedule"]
#: Pages that name something of acme's.
OWNED = [
    "/console/adapters/invoices",
    "/console/adapters/invoices/versions/1",
    "/console/adapters/invoices/versions/1/status",
    "/console/adapters/invoices/schedule",
    "/console/keys/{key}/revoke",
    "/console/training/runs/{run}",
    "/console/training/runs/{run}/status",
]
#: What only POST does, with what it takes. None may be done by a stranger or a viewer.
POSTS = [
    "/console/keys/{key}/revoke",
    "/console/adapters/invoices/versions/1/complete",
    "/console/training/runs/{run}/cancel",
]


def fill(path: str, acme: Party, belongings: Belongings) -> str:
    return path.format(run=belongings.run.id, key=acme.api_key.public_id)


def developer_of(party: Party) -> User:
    with tenant_scope(party.tenant.id):
        return services.member_add(
            email="developer@acme.example", role=Role.DEVELOPER, password=PASSWORD
        ).user


@pytest.mark.parametrize("path", READABLE + WRITING)
def test_owner_sees_the_page(path: str, acme: Party, belongings: Belongings) -> None:
    answer = browser_of(acme.owner).get(fill(path, acme, belongings))
    assert answer.status_code == 200


@pytest.mark.parametrize("path", READABLE)
def test_viewer_reads_the_page(path: str, acme: Party, belongings: Belongings) -> None:
    answer = browser_of(acme.viewer).get(fill(path, acme, belongings))
    assert answer.status_code == 200


@pytest.mark.parametrize("path", WRITING)
def test_developer_builds_and_viewer_does_not(
    path: str, acme: Party, belongings: Belongings
) -> None:
    assert browser_of(developer_of(acme)).get(path).status_code == 200
    assert browser_of(acme.viewer).get(path).status_code == 403


def test_developer_manages_no_keys(acme: Party) -> None:
    browser = browser_of(developer_of(acme))
    assert browser.post("/console/keys/new", {"name": "x"}).status_code == 403
    assert browser.post(f"/console/keys/{acme.api_key.public_id}/revoke").status_code == 403


@pytest.mark.parametrize("path", POSTS)
def test_viewer_changes_nothing(path: str, acme: Party, belongings: Belongings) -> None:
    answer = browser_of(acme.viewer).post(fill(path, acme, belongings))
    assert answer.status_code == 403


def without_tokens(body: bytes) -> bytes:
    """A page without its CSRF tokens, which differ every time."""
    return re.sub(rb"[A-Za-z0-9]{64}", b"token", body)


@pytest.mark.parametrize("path", OWNED)
def test_stranger_gets_what_a_missing_thing_gives(
    path: str, acme: Party, globex: Party, belongings: Belongings
) -> None:
    browser = browser_of(globex.owner)
    answer = browser.get(fill(path, acme, belongings))
    absent = path.replace("invoices", "no-such").format(run=uuid.uuid4(), key="no-such")
    missing = browser.get(absent)
    assert answer.status_code == missing.status_code == 404
    assert without_tokens(answer.content) == without_tokens(missing.content)


@pytest.mark.parametrize("path", POSTS)
def test_stranger_changes_nothing(
    path: str, acme: Party, globex: Party, belongings: Belongings
) -> None:
    answer = browser_of(globex.owner).post(fill(path, acme, belongings))
    assert answer.status_code == 404


@pytest.mark.parametrize("path", READABLE + WRITING)
def test_nobody_is_sent_to_sign_in(path: str, acme: Party, belongings: Belongings) -> None:
    path = fill(path, acme, belongings)
    answer = Client().get(path)
    assert answer.status_code == 302
    assert answer.url.startswith("/console/sign-in?next=")


def test_fragment_sends_the_whole_window_to_sign_in(acme: Party, belongings: Belongings) -> None:
    answer = Client().get(
        "/console/adapters/invoices/versions/1/status", headers={"hx-request": "true"}
    )
    assert answer.status_code == 204
    assert answer.headers["HX-Redirect"] == "/console/sign-in"


def test_person_without_a_tenant_is_told_so(db: None) -> None:
    user = services.user_create(email="nobody@example.com", password=PASSWORD)
    answer = browser_of(user).get("/console/")
    assert answer.status_code == 403
    assert b"You belong to no tenant yet" in answer.content


def test_operator_without_a_tenant_goes_to_the_admin(db: None) -> None:
    user = make_operator("op@example.com")
    answer = browser_of(user).get("/console/")
    assert (answer.status_code, answer.url) == (302, "/admin/")


def test_suspended_tenant_is_closed(acme: Party) -> None:
    Tenant.objects.filter(id=acme.tenant.id).update(status=Tenant.Status.SUSPENDED)
    answer = browser_of(acme.owner).get("/console/")
    assert answer.status_code == 403
    assert b"suspended" in answer.content


def test_person_of_two_tenants_switches(acme: Party, globex: Party) -> None:
    with tenant_scope(globex.tenant.id):
        services.member_add(email=acme.owner.email, role=Role.VIEWER)
    browser = browser_of(acme.owner)
    assert b"Acme in the last" in browser.get("/console/").content
    browser.post("/console/tenant", {"tenant": str(globex.tenant.id)})
    assert b"Globex in the last" in browser.get("/console/").content
    with tenant_scope(globex.tenant.id):
        Membership.objects.filter(user=acme.owner).delete()
    assert b"Acme in the last" in browser.get("/console/").content


def test_nobody_switches_into_anothers_tenant(acme: Party, globex: Party) -> None:
    browser = browser_of(acme.owner)
    answer = browser.post("/console/tenant", {"tenant": str(globex.tenant.id)})
    assert answer.status_code == 404
    assert b"Acme in the last" in browser.get("/console/").content


def test_pages_forbid_foreign_and_inline_scripts(acme: Party) -> None:
    answer = browser_of(acme.owner).get("/console/upload")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert re.search(rb"<script(?![^>]*\bsrc=)", answer.content) is None
    assert b" style=" not in answer.content
    assert re.search(rb"\son[a-z]+=", answer.content) is None


def test_forms_need_the_csrf_token(acme: Party) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(acme.owner)
    assert browser.post(reverse("console:create_key"), {"name": "x"}).status_code == 403


@pytest.mark.parametrize(
    "path", ["adapters/%00", "adapters/%00/versions/1", "adapters/%00/schedule", "keys/%00/revoke"]
)
def test_name_with_a_nul_is_no_name(path: str, acme: Party) -> None:
    browser = browser_of(acme.owner)
    for answer in (browser.get(f"/console/{path}"), browser.post(f"/console/{path}")):
        assert answer.status_code in (404, 405)
