"""Every page of the console in a browser: no error, nothing the security policy forbids."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from controlplane.console.urls import urlpatterns
from tests.browser.conftest import PASSWORD, Site, sign_in, window

pytestmark = pytest.mark.browser

#: Pages that anybody of the tenant may open without naming something.
PAGES = [
    "",
    "adapters",
    "upload",
    "import",
    "aliases",
    "new-alias",
    "playground",
    "training",
    "morning",
    "evaluations",
    "suites/new",
    "captured",
    "usage",
    "usage?span=quarter&by=key&measure=requests",
    "requests",
    "requests?state=slow&span=week&model=invoices",
    "keys",
    "limits",
    "members",
    "service-accounts",
    "webhooks",
    "notifications",
    "audit",
    "audit?action=tenant&since=2026-01-01",
    "settings",
    "security",
]
ACCOUNT_PAGES = [
    "account/password/change/",
    "account/reauthenticate/",
    "account/2fa/totp/activate/",
    "account/2fa/webauthn/add/",
    "account/2fa/recovery-codes/generate/",
    "account/sessions/",
    "account/3rdparty/",
]
STRANGERS_PAGES = [
    "sign-in",
    "account/password/reset/",
    "account/password/reset/done/",
    "account/password/reset/key/x-y/",
    "account/confirm-email/nonsense/",
    "account/inactive/",
    "account/signup/",
    "account/3rdparty/login/cancelled/",
    "account/3rdparty/login/error/",
    "account/2fa/authenticate/",
    "invites/no-such-token",
]


def test_no_page_without_a_name_is_forgotten() -> None:
    plain = {
        str(pattern.pattern)
        for pattern in urlpatterns
        if not pattern.pattern.converters and pattern.callback.__module__.startswith("controlplane")
    }
    only_posted = {
        "tenant",
        "security/email",
        "members/invites",
        "service-accounts/new",
        "keys/new",
        "upload/start",
        "webhooks/new",
        "playground/run",
        "playground/vectors",
        "limits/now",
        "requests/newest",
        "settings/request-log",
        "limits/set",
        "budgets/set",
        "audit/verify",
        "training/datasets",
        "training/runs",
        "training/cost",  # a part of the training page's form
        "evaluations/run",
        "suites/add-case",
        "captured/dataset",
        "captured/erase",
        "settings/capture",
        "evaluations/compare",  # read, but it names two evaluations
    }
    rest = {text for text in plain if text.startswith("^")}
    assert plain - only_posted - rest == {page.partition("?")[0] for page in PAGES}


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def visit(page: Page, path: str) -> None:
    """The page, and that it is one of ours: it has a heading and lies within the screen."""
    page.goto(f"/console/{path}")
    expect(page.locator("h1").first).to_be_attached()
    assert page.evaluate(OVERFLOW) <= 0, path
    assert "Lorikeet" in page.title()


def test_every_page_opens_and_fits_a_phone(page: Page) -> None:
    for path in PAGES:
        page.set_viewport_size({"width": 1280, "height": 720})
        visit(page, path)
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate(OVERFLOW) <= 0, path


def test_what_can_be_done_with_a_key_is_in_sight(page: Page, site: Site) -> None:
    page.goto("/console/keys")
    page.get_by_label("Name").fill("a-rather-long-name-of-a-program-that-calls-us")
    page.get_by_text("What it may do").click()
    page.get_by_label("Only these models").fill("invoices letters@3")
    page.get_by_label("Only from these addresses").fill("192.0.2.0/24 2001:db8:1234:5678::/64")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#new-key")).to_be_visible()
    page.goto("/console/keys")
    page.get_by_role("link", name="Rotate a-rather-long").click()
    page.get_by_role("button", name="Rotate the key").click()  # two secrets take more room
    for width in (1440, 1024, 840, 360):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/console/keys")
        for name in ("Change", "Rotate", "Revoke"):
            link = page.get_by_role("link", name=f"{name} a-rather-long").first
            box, card = link.bounding_box(), page.locator(".card.flush").bounding_box()
            assert box is not None, (width, name)
            assert card is not None
            assert box["x"] + box["width"] <= card["x"] + card["width"], (width, name)


def test_security_is_found_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto("/console/")
    page.get_by_role("link", name="Security").click()
    page.wait_for_url("**/console/security")


def test_a_spent_budget_is_red(page: Page) -> None:
    page.goto("/console/limits")
    page.get_by_label("Period").select_option("day")
    page.get_by_label("Hard").fill("0")
    page.get_by_role("button", name="Set the budget").click()
    meter = page.locator("meter.bad")
    expect(meter).to_have_count(1)
    rule = "meter.bad::-webkit-meter-optimum-value"
    colour = """rule => [...document.styleSheets].flatMap(sheet => [...sheet.cssRules])
        .find(found => found.selectorText === rule).style.background"""
    assert page.evaluate(colour, rule) == "var(--bad)"
    page.get_by_role("row").filter(has=meter).get_by_role("button", name="Remove").click()
    expect(page.locator("meter.bad")).to_have_count(0)


def test_the_accounts_own_pages_open(page: Page) -> None:
    visit(page, "account/2fa/totp/activate/")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()
    page.wait_for_url("**/activate/")
    for path in ACCOUNT_PAGES:
        visit(page, path)


def test_pages_for_strangers_open(browser: Browser, site: Site) -> None:
    with window(browser, site.base_url, but=r"status of 40[14]") as page:
        for path in STRANGERS_PAGES:
            visit(page, path)


def test_invite_from_its_making_to_its_acceptance(page: Page, browser: Browser, site: Site) -> None:
    page.goto("/console/members")
    page.get_by_label("E-mail address").fill("invited@acme.example")
    page.get_by_role("button", name="Invite").click()
    shown = page.locator("#new-invite")
    expect(shown).to_be_visible()
    url = shown.inner_text()
    mails = [file.read_text() for file in site.mail.iterdir()]
    assert any("To: invited@acme.example" in mail and url in mail for mail in mails)
    with window(browser, site.base_url) as guest:
        guest.goto(url)
        guest.get_by_label("Password").fill(PASSWORD)
        guest.get_by_role("button", name="Accept").click()
        guest.wait_for_url("**/console/")
    page.reload()
    expect(page.get_by_role("row").filter(has_text="invited@acme.example").last).to_contain_text(
        "accepted"
    )


def test_limits_audit_and_keys_by_hand(page: Page) -> None:
    page.goto("/console/limits")
    page.get_by_label("Requests per minute").fill("7")
    page.get_by_label("Model").fill("invoices")
    page.get_by_role("button", name="Set the limit").click()
    expect(page.get_by_text("0 of 7 requests a minute")).to_be_visible()
    page.get_by_label("Hard").fill("1000")
    page.get_by_role("button", name="Set the budget").click()
    expect(page.get_by_text("of 1,000, then it refuses")).to_be_visible()
    page.goto("/console/audit")
    page.get_by_role("button", name="Verify the chain").click()
    expect(page.get_by_role("heading", name="The chain is intact")).to_be_visible()
    page.get_by_text("rate_limit.created", exact=True).last.click()
    expect(page.get_by_text('"requests_per_minute": 7')).to_be_visible()
    page.goto("/console/keys")
    page.get_by_label("Name").fill("narrow")
    page.get_by_text("What it may do").click()
    page.get_by_label("train adapters").uncheck()
    page.get_by_label("Only these models").fill("invoices")
    page.get_by_role("button", name="Create key").click()
    row = page.get_by_role("row").filter(has_text="narrow")
    expect(row).to_contain_text("only invoices")
    expect(row).not_to_contain_text("training:write")


def test_a_tenant_that_asks_for_a_second_factor(browser: Browser, site: Site) -> None:
    site.manage("tenant_create", "--slug=strict", "--name=Strict")
    email = "owner@strict.example"
    site.manage(
        *("member_add", "--tenant=strict", f"--email={email}", "--role=owner"),
        "--password-stdin",
        text=PASSWORD + "\n",
    )
    with window(browser, site.base_url) as page:
        sign_in(page, email)
        page.wait_for_url("**/console/")
        page.goto("/console/settings")
        page.get_by_label("Members must have a second factor").check()
        page.get_by_role("button", name="Save", exact=True).click()
        page.wait_for_url("**/console/security")
        expect(page.get_by_role("heading", name="Strict asks for a second factor")).to_be_visible()
        page.get_by_role("link", name="Set up an app").click()
        expect(page).to_have_url(re.compile("reauthenticate"))


def test_who_is_not_allowed_is_told_so(browser: Browser, site: Site) -> None:
    email = site.add_person("onlooker", "viewer")
    with window(browser, site.base_url, but=r"status of 403") as page:
        sign_in(page, email)
        page.wait_for_url("**/console/")
        page.goto("/console/audit")
        expect(page.get_by_role("heading", name="Your role may not do this")).to_be_visible()
        expect(page.get_by_role("link", name="Audit trail")).to_have_count(0)
