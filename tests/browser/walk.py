"""What is wrong with a page for those who use a keyboard, a screen reader, a phone or the dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: What scrolls, cannot be scrolled by keyboard, and has no name.
_UNREACHABLE = """() => [...document.querySelectorAll('body *')].filter(each => {
    const style = getComputedStyle(each);
    const scrolls = (flow, whole, seen) => /auto|scroll/.test(flow) && whole > seen + 1;
    if (each.clientWidth < 2 || each.localName === 'textarea') return false;
    if (!scrolls(style.overflowX, each.scrollWidth, each.clientWidth) &&
        !scrolls(style.overflowY, each.scrollHeight, each.clientHeight)) return false;
    const isNamed = each.tabIndex >= 0 && each.role && each.ariaLabel;
    return !isNamed && !each.querySelector('nav, [role=region]') && !each.closest('nav');
}).map(each => each.outerHTML.slice(0, 120))"""
_WAIT = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
_COLOURS = {"runOnly": ["color-contrast"]}
#: Width, theme, and axe's options: its other rules do not depend on the theme.
VIEWS: list[tuple[int, Literal["light", "dark"], dict[str, list[str]]]] = [
    *((1280, "light", {}), (1280, "dark", _COLOURS)),
    *((390, "light", _COLOURS), (390, "dark", {})),
]

_axe = Axe()


def faults_of(page: Page) -> Iterator[str]:
    """Look at the opened page in two widths and two themes; yield a line for each fault."""
    for width, theme, options in VIEWS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        page.evaluate(_WAIT)
        where = f"{page.url} ({width} px, {theme})"
        if (over := page.evaluate(OVERFLOW)) > 0:
            yield f"{where}: {over} px are off screen"
        for html in page.evaluate(_UNREACHABLE):
            yield f"{where}: not scrolled by keyboard: {html}"
        found = _axe.run(page, options={"resultTypes": ["violations"], **options}).response
        for violation in found["violations"]:
            for node in violation["nodes"][:3]:
                yield f"{where}: {violation['id']}: {node['html'][:160]}"


#: Texts as they should not be shown: a float with all its digits, an id that names a row.
RAW_FLOAT = re.compile(r"(?<![\d:.])\d+\.\d{5,}")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def shape_of(address: str) -> str:
    """What pages of one kind have in common: the path without ids, and whether it is a filter's."""
    parts = urlsplit(address)
    fields = {field.partition("=")[0] for field in parts.query.split("&")}
    kind = "popup" if "_popup" in fields else "page" if fields & {"p", "o"} else ""
    # A form is the same whatever the list was that led to it.
    is_filter = bool(parts.query) and not parts.path.endswith(("/add/", "/change/", "/history/"))
    return f"{UUID.sub('*', parts.path)} {kind or ('filter' if is_filter else '')}"


def operator_pages(page: Page, base_url: str) -> Iterator[str]:
    """Open one page of each kind that links lead to."""
    waiting, known = ["/admin/"], {shape_of("/admin/")}
    for path in waiting:
        answer = page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        links = page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)")
        for link in links:
            own = link.removeprefix(base_url).partition("#")[0]
            if own.startswith("/admin/") and shape_of(own) not in known:
                known.add(shape_of(own))
                waiting.append(own)
        yield path
