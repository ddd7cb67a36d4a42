"""What holds for every template of the console."""

from __future__ import annotations

import re

from django.conf import settings

TEMPLATES = sorted((settings.BASE_DIR / "controlplane" / "console").rglob("templates/**/*.html"))
SCROLLS = r'<div class="(?:ops-)?scroll"[^>]*>|<pre[^>]*>'
NAMED = r' tabindex="0" role="(?:region|group)" aria-label="[^"]'


def test_what_scrolls_is_reached_by_keyboard_and_has_a_name() -> None:
    tags = [
        (template.name, tag)
        for template in TEMPLATES
        for tag in re.findall(
            r'<div class="(?:ops-)?scroll"[^>]*>|<pre[^>]*>', template.read_text()
        )
    ]
    assert len(tags) > 40
    wrong = [each for each in tags if "wrapped" not in each[1] and not re.search(NAMED, each[1])]
    assert wrong == []
