"""An alias's page in a browser: what an owner does with a canary, and that a viewer cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ROOT, Site, sign_in, window

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def alias(site: Site) -> str:
    """The address of an alias in the middle of a ramp."""
    argv = [sys.executable, "-m", "tests.browser.alias_seed"]
    subprocess.run(argv, cwd=ROOT, env=dict(site.env), check=True)
    return "/console/aliases/prod"


def shoot(page: Page, name: str) -> None:
    """Keep a picture of the page in the folder LORIKEET_TEST_PICTURES, if that is set."""
    if folder := os.environ.get("LORIKEET_TEST_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_a_viewer_sees_the_canary_and_can_do_nothing(
    browser: Browser, site: Site, alias: str
) -> None:
    email = site.add_person("alias-viewer", "viewer")
    with window(browser, site.base_url) as page:
        sign_in(page, email)
        page.wait_for_url("**/console/")
        page.goto(alias)
        expect(page.get_by_role("heading", name="Canary beside primary")).to_be_visible()
        expect(page.get_by_text("2.0% of 150")).to_be_visible()
        expect(page.locator("main form")).to_have_count(0)


def test_the_page_fits_every_screen(page: Page, alias: str) -> None:
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for width in (1440, 840, 360):
        page.set_viewport_size({"width": width, "height": 900})
        for path in (alias, "/console/aliases", f"{alias}/edit"):
            page.goto(path)
            expect(page.locator("h1").first).to_be_attached()
            assert page.evaluate(overflow) <= 0, (path, width)
            shoot(page, f"{path.strip('/').replace('/', '-')}-{width}")


def test_an_owner_pauses_ramps_and_promotes(page: Page, alias: str) -> None:
    page.goto(alias)
    page.get_by_role("button", name="Pause the ramp").click()
    expect(page.get_by_text("The ramp is paused.")).to_be_visible()
    page.get_by_label("Percent for the canary").fill("20")
    page.get_by_role("button", name="Set its share").click()
    expect(page.get_by_text("The canary answers 20 % of the callers.")).to_be_visible()
    page.get_by_role("button", name="Make it the primary").click()
    expect(page.get_by_text("The canary is the primary now.")).to_be_visible()
    page.get_by_role("button", name="Go back to revision 2").click()
    expect(page.get_by_text("The earlier revision is current again.")).to_be_visible()
    expect(page.get_by_text("1 %: receipts@2").first).to_be_visible()
