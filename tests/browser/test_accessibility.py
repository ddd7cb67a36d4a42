"""Every page of the console with long contents, in two widths and two themes, with axe-core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import WALKER, Site, sign_in, window
from tests.browser.test_pages import PAGES, STRANGERS_PAGES
from tests.browser.walk import faults_of

pytestmark = pytest.mark.browser


@pytest.fixture
def owner(browser: Browser, site: Site, walked_pages: list[str]) -> Iterator[Page]:
    with window(browser, site.base_url) as opened:
        sign_in(opened, WALKER)
        opened.wait_for_url("**/console/")
        yield opened


@pytest.mark.timeout(600)
def test_no_page_of_the_console_has_a_fault(owner: Page, walked_pages: list[str]) -> None:
    faults: list[str] = []
    for path in [*PAGES, *walked_pages]:
        answer = owner.goto(f"/console/{path}")
        assert answer is not None
        assert answer.status == 200, path
        faults += faults_of(owner)
    assert faults == []


def test_no_page_for_strangers_has_a_fault(browser: Browser, site: Site) -> None:
    with window(browser, site.base_url, but=r"status of 40[14]") as page:
        faults: list[str] = []
        for path in STRANGERS_PAGES:
            page.goto(f"/console/{path}")
            faults += faults_of(page)
    assert faults == []


def test_both_answers_of_a_comparison_are_in_sight(owner: Page, walked_pages: list[str]) -> None:
    [path] = [path for path in walked_pages if "compare" in path]
    for width in (1440, 1100, 390):
        owner.set_viewport_size({"width": width, "height": 900})
        owner.goto(f"/console/{path}")
        answers = owner.locator(".pair pre")
        assert answers.count() == 6
        for box in answers.all():
            place = box.bounding_box()
            assert place is not None
            assert place["x"] + place["width"] <= width
            assert box.evaluate("box => box.scrollWidth - box.clientWidth") <= 0
            assert place["height"] <= 450  # the rest scrolls inside
