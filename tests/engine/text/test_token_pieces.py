"""Tokens as log-probabilities show them, where a word's space is written into its token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

from hypothesis import given
from hypothesis import strategies as st

from contract.messages.protocol import TokenEvent
from engine.request import FinishReason, RequestOutput, TokenLogprob
from engine.text.codec import TextCodec
from tests.engine.text.vocabularies import BYTES, TOKENIZERS, byte_fallback
from tests.worker.serving.test_active import make_request


@pytest.fixture(scope="module", params=["always", "first", "never", "byte fallback"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("metaspace")
    TOKENIZERS[request.param]().save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def answered(codec: TextCodec, ids: list[int], **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text and the tokens of an answer, a token a step, with two alternatives for each."""
    request = make_request(codec, logprobs=2, **fields)
    events: list[TokenEvent] = []
    for number, token_id in enumerate(ids):
        top = ((token_id, -0.5), (ids[0], -1.5))
        output = RequestOutput(
            request_id="r",
            token_ids=[token_id],
            logprobs=[TokenLogprob(token_id, -0.5, top)],
            num_generated=number + 1,
            finish_reason=FinishReason.STOP if number == len(ids) - 1 else None,
        )
        request.feed(output, 101.0)
        events += [news.event for news in request.take_news()]
    entries = [entry for event in events for entry in event.logprobs or ()]
    return "".join(event.text for event in events), entries


def bytes_of(entries: list[dict[str, Any]]) -> bytes:
    return bytes(itertools.chain.from_iterable(entry["bytes"] for entry in entries))


CHAT: dict[str, Any] = {"text": None, "messages": ({"role": "user", "content": "x"},)}
TEXTS = st.lists(
    st.sampled_from(["the", " ", "  ", "quick", "Köln", "a", "\n", ":", " the fox"]), min_size=1
).map("".join)


@given(TEXTS, st.booleans(), st.booleans())
def test_the_tokens_bytes_are_the_texts(
    codec: TextCodec, text: str, is_chat: bool, details: bool
) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    shown, entries = answered(codec, ids, token_details=details, **(CHAT if is_chat else {}))
    assert bytes_of(entries) == shown.encode()
    assert [entry["token"] for entry in entries] == [
        entry["top_logprobs"][0]["token"] for entry in entries
    ]
    if is_chat:
        assert shown == codec.decode(ids)


@given(st.data())
def test_any_tokens_at_all_are_their_text(codec: TextCodec, data: st.DataObject) -> None:
    """Special ones among them, which the text leaves out; of bytes those that are characters."""
    names = [codec._tokenizer.id_to_token(token_id) for token_id in range(codec.vocab_size)]
    whole = [i for i, name in enumerate(names) if name not in BYTES[0x80:]]
    ids = data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=12))
    shown, entries = answered(codec, ids, **(CHAT if data.draw(st.booleans()) else {}))
    assert bytes_of(entries) == shown.encode()


@given(TEXTS, TEXTS)
def test_a_raw_prompt_and_its_answer_read_as_one_text(
    codec: TextCodec, prompt: str, answer: str
) -> None:
    before = codec.encode(f"a{prompt}", add_special_tokens=False)
    ids = codec.encode(answer, add_special_tokens=False)
    shown, _ = answered(codec, ids)
    assert codec.decode(before) + shown == codec.decode([*before, *ids])


def test_words_keep_their_spaces(tmp_path: Path) -> None:
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    ids = codec.encode("the the", add_special_tokens=False)
    for fields, first in ((CHAT, "the"), ({}, " the")):
        shown, entries = answered(codec, ids, **fields)
        assert [entry["token"] for entry in entries] == [first, " the"]
        assert shown == f"{first} the"
        # An alternative is shown as what would stand in its place.
        assert entries[1]["top_logprobs"][1]["token"] == " the"
