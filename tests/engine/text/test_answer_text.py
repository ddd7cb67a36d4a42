"""An answer's text, of any vocabulary, however its tokens come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.text.answer_text import AnswerText, Detokenizer, StopStrings
from engine.text.token_pieces import TokenPieces
from tests.engine.text.vocabularies import BYTES, SPECIAL, TOKENIZERS, byte_fallback, byte_level

PIECES = ["the", " ", "  ", "世", "丗", "🦜", "e\u0301", "ข", "Köln", "\ufffd", "\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
#: U+FFFD stands for an incomplete character, too.
CLEAN_TEXTS = TEXTS.filter(lambda text: text and "\ufffd" not in text)


class Vocabulary:
    """A tokenizer and its pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.pieces = tokenizer, TokenPieces(tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        detokenizer = Detokenizer(self.pieces)
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()

    def name(self, token_id: int) -> str | None:
        return cast("str | None", self.tokenizer.id_to_token(token_id))


@pytest.fixture(scope="module", params=TOKENIZERS)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(TOKENIZERS[request.param]())


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def bytewise(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param())


def whole_text(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    """As the tokenizers library decodes; but that garbles a whole run of bytes for one of them."""
    names = [vocabulary.name(token_id) for token_id in token_ids]
    if not set(names) & set(BYTES):
        return str(vocabulary.tokenizer.decode(token_ids))
    raw = b"".join(
        bytes([int(name[3:5], 16)]) if name in BYTES else name.replace("▁", " ").encode()
        for name in names
        if name is not None and name not in SPECIAL
    )
    return raw.decode(errors="replace").removeprefix(" ")


@settings(deadline=None)
@given(st.data())
def test_any_tokens_at_all_are_the_tokenizers_text(
    vocabulary: Vocabulary, data: st.DataObject
) -> None:
    """Garbage, special tokens and ids without a token among them."""
    size = vocabulary.tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 2), max_size=12))
    text = vocabulary.decode(ids)
    assert text.removesuffix(" ") == whole_text(vocabulary, ids).removesuffix(" ")


@settings(deadline=None)
@given(TEXTS)
def test_a_text_comes_back(bytewise: Vocabulary, text: str) -> None:
    ids = bytewise.encode(text)
    assert bytewise.decode(ids) == text == bytewise.tokenizer.decode(ids)


@settings(deadline=None)
@given(TEXTS)
def test_no_half_character_is_shown_and_no_whole_one_held_back(
    bytewise: Vocabulary, text: str
) -> None:
    detokenizer = Detokenizer(bytewise.pieces, continues=True)
    shown, raw = "", b""
    for token_id in bytewise.encode(text):
        raw += bytewise.pieces.of(token_id, is_first=False).bytes
        shown += detokenizer.feed(token_id)
        assert shown == raw.decode(errors="ignore")
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_cut_in_mid_character_leaves_the_others_alone(missing: int) -> None:
    """Where the tokenizers library makes all characters of the run U+FFFD."""
    vocabulary = Vocabulary(byte_fallback())
    assert vocabulary.decode(vocabulary.encode("a 🦜ข🦜")[:-missing]) == "a 🦜ข\ufffd"


def test_a_text_begins_behind_what_adds_nothing() -> None:
    vocabulary = Vocabulary(byte_fallback())
    ids = vocabulary.encode("the the")
    assert vocabulary.decode([1, 99_999, *ids, 2]) == "the the"
    assert vocabulary.decode([*vocabulary.encode("  ")[:1], *ids]).startswith(" ")


def test_a_long_run_of_garbage_is_decoded_in_linear_time(bytewise: Vocabulary) -> None:
    garbage = bytewise.tokenizer.token_to_id("<0xFF>")
    ids = [bytewise.tokenizer.token_to_id("ÿ") if garbage is None else garbage] * 50_000
    assert bytewise.decode(ids) == "\ufffd" * len(ids)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that stop string."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.data(),
)
def test_stop_strings_cut_as_if_the_text_came_whole(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    stop_strings, shown, met, rest = StopStrings(stops), "", None, text
    while rest and met is None:
        size = data.draw(st.integers(1, 5))
        piece, met = stop_strings.feed(rest[:size])
        shown, rest = shown + piece, rest[size:]
        assert cut(text, stops)[0].startswith(shown)  # nothing is ever shown too early
    if met is None:
        shown += stop_strings.finish()
    seen = text[: len(text) - len(rest)]
    assert (shown, met) == cut(seen, stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    stop_strings = StopStrings(["END"])
    assert stop_strings.feed("the E") == ("the ", None)
    assert stop_strings.feed("N") == ("", None)
    assert stop_strings.feed("TER") == ("ENTER", None)
    assert stop_strings.feed("the END of it") == ("the ", "END")


def test_a_piece_may_have_several_stop_strings() -> None:
    assert StopStrings(["ab", "abc", "b"]).feed("xabcb") == ("x", "ab")
    assert StopStrings(["c", "abc"]).feed("xabcb") == ("x", "abc")
    assert StopStrings(["abcd", "c"]).feed("abcd") == ("ab", "c")


@settings(deadline=None)
@given(CLEAN_TEXTS, st.data())
def test_a_stop_string_ends_the_text_at_the_token_that_completes_it(
    bytewise: Vocabulary, text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    answer, shown, read = AnswerText(bytewise.pieces, [stop, "\n🦢"]), "", []
    for token_id in bytewise.encode(text):
        read.append(token_id)
        shown += answer.feed(token_id)[1]
        if answer.stop_string is not None:
            break
    assert (shown, answer.stop_string) == cut(text, [stop])
    assert stop in bytewise.decode(read)
    assert stop not in bytewise.decode(read[:-1])


def test_a_stop_string_in_what_an_end_completes() -> None:
    vocabulary = Vocabulary(byte_level())
    answer = AnswerText(vocabulary.pieces, ["a\ufffd"])
    half = vocabulary.encode("🦢")[0]
    assert [answer.feed(i)[1] for i in (*vocabulary.encode("xa"), half)] == ["x", "", ""]
    assert (answer.finish(), answer.stop_string) == ("", "a\ufffd")
