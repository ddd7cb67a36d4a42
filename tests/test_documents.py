"""The pages lead somewhere: their links name files and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cli/*.md")]
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
_CODE = re.compile(r"^```.*?^```$", re.M | re.S)
_PATH = re.compile(r"`((?:controlplane|contract|engine|worker|kernels|tests|bench|docs)/[\w/.]+)`")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for name, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{name} is not there"
        assert not anchor or anchor in anchors(target), f"{name} has no heading #{anchor}"


@pytest.mark.parametrize(
    "name", ["README.md", "docs/architecture.md", "docs/changing.md", "docs/glossary.md"]
)
def test_the_files_that_a_newcomer_is_sent_to_are_there(name: str) -> None:
    paths = _PATH.findall((ROOT / name).read_text())
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []
