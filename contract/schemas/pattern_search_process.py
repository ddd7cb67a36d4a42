"""Search patterns in texts in a sealed process.

Imports no Django and no settings. The work: {"searches": [[pattern, text], …]}, with patterns of
JSON Schema that `contract.schemas.patterns.read_pattern` accepts. The answer: {"found": [whether,
…]}.
"""

from __future__ import annotations

import re
from typing import Any, BinaryIO

from contract.process.sealed_process import serve
from contract.schemas.patterns import read_pattern


def work(described: dict[str, Any], files: list[BinaryIO]) -> dict[str, Any]:
    """Return whether each pattern is found in its text."""
    return {"found": [is_found(pattern, text) for pattern, text in described["searches"]]}


def is_found(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text. Its time is not bounded here."""
    # Python writes the end of a text as \Z, other engines as \z; words are ASCII's.
    written = read_pattern(pattern).search.replace(r"\z", r"\Z")
    return re.search(written, text, re.ASCII) is not None


if __name__ == "__main__":
    serve(work)
