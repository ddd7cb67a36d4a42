"""The tenant's settings, and the second factor it may ask of its members."""

from __future__ import annotations

import json
import time

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import (
    SECRET_SESSION_KEY,
    TOTP,
    format_hotp_value,
    generate_totp_secret,
    hotp_value,
)
from django.test import Client

from controlplane.events.audit.models import AuditEvent
from controlplane.requestlog.services import log_policy
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Role, User
from controlplane.tenants.services import member_add
from tests.controlplane.conftest import PASSWORD, Party, as_key, as_user, assert_error, make_party
from tests.controlplane.console.conftest import browser_of

SETTINGS = "/console/settings"


def require(party: Party) -> None:
    form = {"name": party.tenant.name, "requires_second_factor": "on"}
    assert browser_of(party.owner).post(SETTINGS, form).status_code == 302


def enrol(user: User) -> Authenticator:
    return TOTP.activate(user, generate_totp_secret()).instance


def test_an_owner_renames_the_tenant(acme: Party) -> None:
    browser = browser_of(acme.owner)
    assert browser.post(SETTINGS, {"name": "Acme Ltd"}).status_code == 302
    assert b"Acme Ltd" in browser.get("/console/").content
    assert browser.post(SETTINGS, {"name": ""}).status_code == 422


def test_an_owner_chooses_what_is_kept_of_requests(acme: Party) -> None:
    browser, url = browser_of(acme.owner), "/console/settings/request-log"
    form = {"content": "on_request", "content_days": "12", "metadata_days": "34"}
    assert browser.post(url, form).status_code == 302
    page = browser.get(SETTINGS).content.decode()
    assert '<option value="on_request" selected>' in page
    assert 'value="12"' in page
    assert browser.post(url, form | {"content_days": "366"}).status_code == 422
    assert browser.post(url, form | {"content": "some"}).status_code == 422
    with tenant_scope(acme.tenant.id):
        assert log_policy().content_days == 12
        assert AuditEvent.objects.filter(action="log_policy.changed").count() == 1
    viewed = browser_of(acme.viewer).get(SETTINGS).content.decode()
    assert "are kept for 12 days, for requests with" in viewed
    assert url not in viewed


def test_who_has_no_second_factor_is_led_to_set_one_up(acme: Party, globex: Party) -> None:
    require(acme)
    with tenant_scope(acme.tenant.id):
        event = AuditEvent.objects.order_by("seq").last()
    assert event is not None
    assert (event.action, event.after) == ("tenant.changed", {"requires_second_factor": True})

    browser = browser_of(acme.viewer)
    for path in ("/console/", "/console/keys", "/console/audit"):
        answer = browser.get(path)
        assert (answer.status_code, answer.url) == (302, "/console/security")
    fragment = browser.get("/console/limits/now", headers={"hx-request": "true"})
    assert fragment.headers["HX-Redirect"] == "/console/security"
    page = browser.get("/console/security").content.decode()
    assert "Acme asks for a second factor" in page
    assert 'aria-label="Main"' not in page  # none of the tenant's pages
    assert_error(as_user(acme.viewer).get("/api/v1/tenant"), 403)
    code = as_user(acme.viewer).get("/api/v1/tenant").json()["error"]["code"]
    assert code == "second_factor_required"
    assert as_key(acme).get("/api/v1/tenant").status_code == 200
    assert browser_of(globex.viewer).get("/console/").status_code == 200


def test_a_second_factor_lets_them_in_and_its_end_shuts_them_out(acme: Party) -> None:
    require(acme)
    factor, browser = enrol(acme.viewer), browser_of(acme.viewer)
    assert browser.get("/console/").status_code == 200
    assert as_user(acme.viewer).get("/api/v1/tenant").status_code == 200
    factor.delete()
    assert browser.get("/console/").status_code == 302


def test_recovery_codes_are_no_second_factor(acme: Party) -> None:
    require(acme)
    RecoveryCodes.activate(acme.viewer)
    assert browser_of(acme.viewer).get("/console/").status_code == 302


def test_one_may_go_to_another_tenant_instead(acme: Party, globex: Party) -> None:
    require(acme)
    with tenant_scope(globex.tenant.id):
        member_add(email=acme.viewer.email, role=Role.VIEWER)
    browser = browser_of(acme.viewer)
    assert browser.get("/console/").status_code == 302
    assert b"Globex" in browser.get("/console/security").content
    browser.post("/console/tenant", {"tenant": str(globex.tenant.id)})
    assert browser.get("/console/").status_code == 200


def test_only_an_owner_asks_for_it(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        admin = member_add(email="admin@acme.example", role=Role.ADMIN).user
    form = {"name": "Acme", "requires_second_factor": "on"}
    assert browser_of(admin).post(SETTINGS, form).status_code == 403
    body = {"requires_second_factor": True}
    assert_error(as_user(admin).patch("/api/v1/tenant", body, format="json"), 403)
    answer = as_user(acme.owner).patch("/api/v1/tenant", body, format="json")
    assert answer.json()["requires_second_factor"] is True


def test_owner_sees_who_has_none(acme: Party) -> None:
    enrol(acme.owner)
    page = browser_of(acme.owner).get(SETTINGS).content.decode()
    assert f"Without one now: {acme.viewer.email}." in page


@pytest.mark.django_db(transaction=True)
def test_a_new_factor_ends_the_sessions_opened_without_it() -> None:
    acme = make_party("acme")
    elsewhere, here = Client(), Client()
    for browser in (elsewhere, here):
        browser.post("/console/sign-in", {"login": acme.viewer.email, "password": PASSWORD})
        assert browser.get("/console/").status_code == 200
    here.post("/console/account/reauthenticate/", {"password": PASSWORD})
    here.get("/console/account/2fa/totp/activate/")
    secret = here.session[SECRET_SESSION_KEY]
    code = format_hotp_value(hotp_value(secret, int(time.time()) // 30))
    assert here.post("/console/account/2fa/totp/activate/", {"code": code}).status_code == 302
    assert here.get("/console/").status_code == 200
    assert elsewhere.get("/console/").status_code == 302
    with tenant_scope(acme.tenant.id):
        told = list(AuditEvent.objects.order_by("seq").values_list("action", "after"))
    assert ("user.signed_in", {"user": acme.viewer.email, "methods": ["password"]}) in told
    assert ("user.second_factor_added", {"user": acme.viewer.email, "type": "totp"}) in told


def test_no_secret_of_a_second_factor_is_in_the_database(acme: Party) -> None:
    secret = generate_totp_secret()
    factor = TOTP.activate(acme.owner, secret).instance
    codes = RecoveryCodes.activate(acme.owner)
    for row in Authenticator.objects.filter(user=acme.owner):
        for hidden in (secret, *codes.generate_codes()):
            assert hidden not in json.dumps(row.data)
    code = format_hotp_value(hotp_value(secret, int(time.time()) // 30))
    assert TOTP(factor).validate_code(code)
    assert not TOTP(factor).validate_code(code)
