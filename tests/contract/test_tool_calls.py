"""Calls read out of a model's text, whatever the pieces it comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.messages.protocol import TokenEvent, Usage
from contract.messages.tool_calls import CallReader, Piece
from controlplane.inference.answers import ChatAnswer

ARGUMENTS = '{"city": "Par\\"is} </tool_call>", "days": [1, {"a": "\\\\"}]}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def read(text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The content, and name and arguments of each call."""
    reader = CallReader()
    pieces: list[Piece] = []
    for start in range(0, len(text), size):
        pieces += reader.feed(text[start : start + size])
    pieces += reader.finish()
    content, calls = "", []
    for piece in pieces:
        if piece.call is None:
            content += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            assert (piece.call_id or "").startswith("call_")
            calls.append((piece.name, ""))
        else:
            name, arguments = calls[piece.call]
            calls[piece.call] = (name, arguments + piece.text)
    return content, calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text,expected",
    [
        (call("f", ARGUMENTS), ("", [("f", ARGUMENTS)])),
        (call("f", "{}") + "\n" + call("g-1", ARGUMENTS), ("", [("f", "{}"), ("g-1", ARGUMENTS)])),
        (call("f", "{}") + call("f", "{}"), ("", [("f", "{}"), ("f", "{}")])),
        ("hello", ("hello", [])),
        (" <tool_car> is text", (" <tool_car> is text", [])),
        ("say <tool_call> again", ("say <tool_call> again", [])),
        ("<tool_c", ("<tool_c", [])),
        ('<tool_call>\n{"name": "f", "arg', ("", [])),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    ],
)
def test_calls_and_text(text: str, expected: tuple[str, list[tuple[str, str]]], size: int) -> None:
    assert read(text, size) == expected


def answer(**fields: Any) -> ChatAnswer:
    return ChatAnswer(
        answer_id="id", created=1, model="m", fingerprint="f", with_usage=False, **fields
    )


def event(text: str, **fields: Any) -> TokenEvent:
    return TokenEvent(request_id="r", lease=1, seq=0, text=text, **fields)


def test_a_whole_message_has_calls_in_place_of_content() -> None:
    last = event(call("f", ARGUMENTS), finish_reason="stop", usage=Usage())
    (choice,) = answer(has_tools=True).whole([last])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": ARGUMENTS}
    (choice,) = answer().whole([last])["choices"]  # nobody asked for tools: it is text
    assert choice["message"]["content"] == last.text
    assert "tool_calls" not in choice["message"]


def test_a_stream_tells_the_name_first_and_then_the_arguments() -> None:
    writer = answer(has_tools=True)
    text = call("f", '{"a": 1}')
    chunks = [
        json.loads(chunk[6:])
        for piece in (text[:30], text[30:-20], text[-20:])
        for chunk in writer.chunks(event(piece))
    ]
    chunks += [json.loads(chunk[6:]) for chunk in writer.chunks(event("", finish_reason="stop"))]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    first = deltas[0]["tool_calls"][0]
    assert (first["index"], first["type"], first["function"]) == (
        0,
        "function",
        {"name": "f", "arguments": ""},
    )
    rest = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert "".join(each["function"]["arguments"] for each in rest) == '{"a": 1}'
    assert not any("id" in each for each in rest)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_was_cut_off_says_so() -> None:
    cut = event('<tool_call>\n{"name": "f", "arguments": {"a', finish_reason="length")
    (choice,) = answer(has_tools=True).whole([cut])["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'
