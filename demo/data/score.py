"""Score an answer: which of an invoice's fields are right, which markers of the style it has.

Pure functions over text, so that the demo, the tests and people score in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demo.data.generate import GREETING, SIGN_OFF

FIELDS = ("vendor", "invoice_number", "date", "currency", "total", "items")


def heldout(tenant: str) -> list[dict[str, Any]]:
    """Return the tenant's held-out rows: {"messages"} and, for acme, {"expected"}."""
    path = Path(__file__).parent / f"{tenant}.heldout.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_json(answer: str) -> dict[str, Any]:
    """Return the first JSON object in the text; code fences and other text are ignored.

    Returns an empty object when there is none.
    """
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", answer):
        try:
            value, _ = decoder.raw_decode(answer, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value:
            return value
    return {}


def invoice_fields(answer: str, expected: dict[str, Any]) -> dict[str, bool]:
    """Return for each field of an invoice whether the answer's JSON has the expected value.

    Text is compared without case, a total as a number in any format.
    """
    found = find_json(answer)
    return {name: _same(found.get(name), expected[name]) for name in FIELDS}


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, bool) or found is None:
        return False
    if isinstance(expected, str):
        return isinstance(found, str) and found.strip().casefold() == expected.casefold()
    if isinstance(found, str):
        digits = re.sub(r"[^0-9.\-]", "", found)
        try:
            found = float(digits)
        except ValueError:
            return False
    return isinstance(found, int | float) and abs(found - expected) < 0.005


def style_markers(answer: str) -> dict[str, bool]:
    """Return for each marker of globex's style whether the answer has it."""
    text = answer.strip()
    return {
        "greeting": text.startswith(GREETING),
        "steps": bool(re.search(r"^1\. .+\n2\. .+$", text, re.MULTILINE)),
        "sign_off": text.endswith(SIGN_OFF),
    }


def share(results: Iterable[dict[str, bool]]) -> float:
    """Return the share of all answers' fields, or markers, that are right: 0 to 1."""
    flags = [flag for result in results for flag in result.values()]
    return sum(flags) / len(flags)
