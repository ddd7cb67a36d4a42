"""The form of API keys."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.tenants import keys


def test_round_trip() -> None:
    parts = keys.generate()
    text = parts.text()
    assert re.fullmatch(keys.KEY_REGEX, text)
    assert keys.parse(text) == parts


def test_environment_is_part_of_the_text() -> None:
    test_key = keys.generate("test")
    assert keys.parse(test_key.text()) == test_key
    assert test_key.text().startswith("lk_test_")
    assert keys.parse(test_key.text().replace("_test_", "_live_")) is None


def test_scanner_finds_the_key_in_a_text() -> None:
    text = keys.generate().text()
    assert re.findall(keys.KEY_REGEX, f'api_key = "{text}"; # prod') == [text]


@pytest.mark.parametrize("position", range(8, 79))
def test_one_wrong_character_is_refused(position: int) -> None:
    text = keys.generate().text()
    wrong = "A" if text[position] != "A" else "B"
    assert keys.parse(text[:position] + wrong + text[position + 1 :]) is None


@given(st.text(max_size=200))
def test_any_text_is_refused_without_an_exception(text: str) -> None:
    assert keys.parse(text) is None
    assert keys.parse("lk_live_" + text) is None


@pytest.mark.parametrize("text", ["\n", " ", "٣"], ids=["newline", "space", "arabic digit"])
def test_trailing_characters_are_refused(text: str) -> None:
    assert keys.parse(keys.generate().text() + text) is None


def test_repr_shows_no_secret() -> None:
    parts = keys.generate()
    assert parts.secret not in repr(parts)


def test_hmac_depends_on_pepper_and_secret() -> None:
    one, other = keys.generate(), keys.generate()
    assert one.secret_hmac("p") == keys.KeyParts("x", one.secret).secret_hmac("p")
    assert len({one.secret_hmac("p"), one.secret_hmac("q"), other.secret_hmac("p")}) == 3
