"""Second factors and passkeys, as a person sets them up and signs in with them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PASSWORD, Site, sign_in, window
from tests.oidc_issuer import Issuer

pytestmark = pytest.mark.browser


def totp(secret: str) -> str:
    """The six digits of now, as RFC 6238 says; they are good for some seconds more."""
    if 30 - time.time() % 30 < 8:
        wait_for_next_code()
    counter = struct.pack(">Q", int(time.time()) // 30)
    digest = hmac.digest(base64.b32decode(secret), counter, hashlib.sha1)
    offset = digest[-1] & 15
    number = struct.unpack(">I", digest[offset : offset + 4])[0] & 0x7FFFFFFF
    return f"{number % 10**6:06d}"


def wait_for_next_code() -> None:
    """No code works twice; the next one comes within half a minute."""
    time.sleep(30.5 - time.time() % 30)


def confirm_password(page: Page) -> None:
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()


def sign_out(page: Page) -> None:
    page.goto("/console/security")
    page.get_by_role("button", name="Sign out", exact=True).click()
    page.wait_for_url("**/console/sign-in")


def give_code(page: Page, code: str) -> None:
    page.get_by_label("Code").fill(code)
    page.get_by_role("button", name="Continue").click()


@pytest.fixture
def stranger(browser: Browser, site: Site) -> Iterator[Page]:
    with window(browser, site.named_url) as opened:
        yield opened


def test_passkeys_are_offered_only_where_they_work(browser: Browser, site: Site) -> None:
    for url, works in ((site.base_url, False), (site.named_url, True)):
        with window(browser, url) as page:
            page.goto("/console/sign-in")
            button = page.get_by_role("button", name="Use a passkey")
            expect(button).to_be_visible(visible=works)
            expect(page.get_by_text("Passkeys need https")).to_be_visible(visible=not works)


@pytest.mark.timeout(400)
def test_app_and_recovery_codes(stranger: Page, site: Site) -> None:
    page, email = stranger, site.add_person("totp")
    sign_in(page, email)
    page.wait_for_url("**/console/")
    page.goto("/console/security")
    page.get_by_role("link", name="Set up an app").click()
    confirm_password(page)
    expect(page.locator("img.qr")).to_be_visible()
    assert page.locator("img.qr").evaluate("image => image.naturalWidth") > 0
    secret = page.get_by_label("Authenticator secret").input_value()
    page.get_by_label("Authenticator code").fill(totp(secret))
    page.get_by_role("button", name="Activate").click()
    codes = page.get_by_label("Unused codes").input_value().split()
    assert len(set(codes)) == 10

    sign_out(page)
    sign_in(page, email)
    page.wait_for_url("**/2fa/authenticate/")
    page.goto("/console/")
    expect(page).not_to_have_url("**/console/")  # the password alone opened nothing
    sign_in_page = page.url
    assert "sign-in" in sign_in_page or "authenticate" in sign_in_page
    page.goto("/console/account/2fa/authenticate/")
    give_code(page, "000000")
    expect(page.get_by_text("Incorrect code")).to_be_visible()
    wait_for_next_code()
    code = totp(secret)
    give_code(page, code)
    page.wait_for_url("**/console/")

    sign_out(page)
    sign_in(page, email)
    give_code(page, code)  # read over somebody's shoulder
    expect(page.get_by_text("Incorrect code")).to_be_visible()
    give_code(page, codes[3])
    page.wait_for_url("**/console/")

    sign_out(page)
    sign_in(page, email)
    give_code(page, codes[3])
    expect(page.get_by_text("Incorrect code")).to_be_visible()
    give_code(page, codes[4])
    page.wait_for_url("**/console/")
    page.goto("/console/security")
    expect(page.get_by_text("8 left")).to_be_visible()


def test_passkey(stranger: Page, site: Site) -> None:
    page, email = stranger, site.add_person("passkey")
    devices = page.context.new_cdp_session(page)
    devices.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2",
        "transport": "internal",
        "hasResidentKey": True,
        "hasUserVerification": True,
        "isUserVerified": True,
        "automaticPresenceSimulation": True,
    }
    device = devices.send("WebAuthn.addVirtualAuthenticator", {"options": options})

    sign_in(page, email)
    page.wait_for_url("**/console/")
    page.goto("/console/security")
    page.get_by_role("link", name="Add a passkey").click()
    confirm_password(page)
    page.get_by_label("Name").fill("laptop")
    page.get_by_role("button", name="Add the passkey").click()
    expect(page.get_by_label("Unused codes")).to_be_visible()
    kept = devices.send("WebAuthn.getCredentials", device)["credentials"]
    assert [credential["isResidentCredential"] for credential in kept] == [True]

    sign_out(page)
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url("**/console/")
    expect(page.get_by_text(email)).to_be_visible()

    sign_out(page)
    sign_in(page, email)
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url("**/console/")

    sign_out(page)
    devices.send("WebAuthn.setUserVerified", {**device, "isUserVerified": False})
    page.get_by_role("button", name="Use a passkey").click()
    expect(page.get_by_role("alert")).to_contain_text("refused")


def test_lost_password(stranger: Page, site: Site) -> None:
    page, email = stranger, site.add_person("forgetful")
    page.goto("/console/sign-in")
    page.get_by_role("link", name="Forgot your password?").click()
    page.get_by_label("E-mail address").fill(email)
    page.get_by_role("button", name="Send the mail").click()
    page.wait_for_url("**/password/reset/done/")
    mails = [file.read_text() for file in site.mail.iterdir()]
    [mail] = [text for text in mails if f"To: {email}" in text]
    [link] = [line for line in mail.splitlines() if line.startswith(site.base_url + "/console/a")]
    page.goto(link.replace(site.base_url, site.named_url))
    page.get_by_label("New password").fill("another long passphrase")
    page.get_by_label("The same again").fill("another long passphrase")
    page.get_by_role("button", name="Change Password").click()
    page.wait_for_url("**/key/done/")
    sign_in(page, email)
    expect(page.get_by_text("do not match")).to_be_visible()
    sign_in(page, email, "another long passphrase")
    page.wait_for_url("**/console/")
    page.goto(link.replace(site.base_url, site.named_url))
    expect(page.get_by_label("New password")).to_have_count(0)


def test_issuer(browser: Browser, site: Site, issuer: Issuer) -> None:
    email = site.add_person("federated")
    issuer.person = {"sub": "7", "email": email, "email_verified": True}
    with window(browser, site.base_url) as page:
        page.goto("/console/keys")
        page.get_by_role("button", name="Continue with Test issuer").click()
        page.wait_for_url("**/console/keys")
        expect(page.get_by_text(email)).to_be_visible()
        page.goto("/console/security")
        expect(page.get_by_text("linked")).to_be_visible()
