"""The origins that a tenant allows: what is one, how many, who sets them."""

from __future__ import annotations

import pytest

from controlplane.errors import InvalidRequest
from controlplane.events.audit.models import AuditEvent
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.origins import MAX_ORIGINS, checked_origins
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.console.conftest import browser_of

URL = "/api/v1/tenant"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("https://app.example.com", "https://app.example.com"),
        (" HTTPS://App.Example.com:443 ", "https://app.example.com"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("https://xn--bcher-kva.example", "https://xn--bcher-kva.example"),
    ],
)
def test_an_origin_is_kept_as_browsers_write_it(given: str, stored: str) -> None:
    assert checked_origins([given, given]) == [stored]


@pytest.mark.parametrize(
    "given",
    [
        *("", "*", "null", "app.example.com", "https://", "https://a.example/", "https://a/b"),
        *("https://*.example.com", "https://u:p@a.example", "ftp://a.example", "https://a b"),
        *("https://a.example:", "https://a.example:0", "https://a.example\r\nx: y", "https://-a"),
        "https://" + "a" * 300,
        "javascript:alert(1)",
        "https://a..example",
    ],
)
def test_what_is_none_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_origins([given])
    assert refused.value.param == "allowed_origins"


def test_an_owner_sets_them_and_it_is_audited(acme: Party, globex: Party) -> None:
    owner = as_user(acme.owner)
    assert owner.get(URL).json()["allowed_origins"] == []
    body = {"allowed_origins": ["https://A.example", "https://a.example"]}
    assert owner.patch(URL, body, format="json").json()["allowed_origins"] == ["https://a.example"]
    with tenant_scope(acme.tenant.id):
        event = AuditEvent.objects.order_by("seq").last()
    assert event is not None
    assert event.after == {"allowed_origins": ["https://a.example"]}
    assert as_user(globex.owner).get(URL).json()["allowed_origins"] == []
    for weaker in (as_user(acme.viewer), as_key(acme)):
        assert weaker.patch(URL, body, format="json").status_code == 403


def test_they_are_few_and_well_formed(acme: Party) -> None:
    owner = as_user(acme.owner)
    many = [f"https://{at}.example" for at in range(MAX_ORIGINS + 1)]
    assert_error(owner.patch(URL, {"allowed_origins": many}, format="json"), 400, "allowed_origins")
    for wrong in (["*"], [1], "https://a.example", [None], [["https://a.example"]]):
        answer = owner.patch(URL, {"allowed_origins": wrong}, format="json")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("allowed_origins")
    assert owner.patch(URL, {"allowed_origins": many[1:]}, format="json").status_code == 200


def test_the_settings_page_sets_them(acme: Party) -> None:
    browser, url = browser_of(acme.owner), "/console/settings"
    form = {"name": "Acme", "allowed_origins": "https://a.example\nhttp://localhost:3000\n"}
    assert browser.post(url, form).status_code == 302
    assert "https://a.example\nhttp://localhost:3000" in browser.get(url).content.decode()
    assert "https://a.example" in browser_of(acme.viewer).get(url).content.decode()
    wrong = browser.post(url, form | {"allowed_origins": "a.example"})
    assert wrong.status_code == 422
    assert "is not an origin" in wrong.content.decode()
    many = "\n".join(f"https://{at}.example" for at in range(MAX_ORIGINS + 1))
    assert browser.post(url, form | {"allowed_origins": many}).status_code == 422
