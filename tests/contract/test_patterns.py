r"""Patterns that every engine reads alike."""

from __future__ import annotations

import re

import pytest
import re2

from contract.patterns import read_pattern

#: Space to ECMA-262 (U+FEFF) or to Python (the others), and not to both.
ODD = ["\x1c", "\x1f", "\x85", "\ufeff"]


@pytest.mark.parametrize("pattern", [r"^\s$", r"^\S$", r"^[\s]$", r"^[\S]$"])
def test_what_is_written_is_space_to_ecma_and_to_python(pattern: str) -> None:
    written = read_pattern(pattern).search
    found = [
        chr(i) for i in range(0x10000) if not 0xD800 <= i <= 0xDFFF and re2.search(written, chr(i))
    ]
    assert found, "some character is in it"
    assert all(re.search(pattern, character) for character in found)


@pytest.mark.parametrize("pattern", [r"^\s$", r"^\S$"])
def test_what_only_one_of_them_takes_for_space_is_neither(pattern: str) -> None:
    written = read_pattern(pattern).search
    assert not any(re2.search(written, character) for character in ODD)
