"""Pairs of answers: the three forms that are read, and the names of what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.row_formats.conversion import Conversion
from contract.training.chat_rows import MAX_LINE_BYTES, lint, read_rows
from contract.training.row_messages import Row, read_row

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
OPENAI = {
    "input": {"messages": [SYSTEM, USER]},
    "preferred_output": [GOOD],
    "non_preferred_output": [BAD],
}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(row: Any) -> Row:
    (found,) = read_rows(jsonl(row).split(b"\n"))
    assert isinstance(found, Row), found
    return found


@pytest.mark.parametrize(
    "row",
    [
        OPENAI,
        OPENAI | {"metadata": {"by": "me"}, "id": 3},
        {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
        {"prompt": "u", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
        {"messages": [SYSTEM, USER, GOOD], "rejected_response": "bad"},
    ],
)
def test_each_form_is_the_same_pair_of_chats(row: Any) -> None:
    pair = read(row)
    assert pair.rejected is not None
    assert pair.rejected == read_row({"messages": [SYSTEM, USER, BAD]})
    assert pair.messages == read_row({"messages": [SYSTEM, USER, GOOD]}).messages
    assert pair.learned == (2,)
    # The converter leaves it as it is.
    conversion = Conversion()
    assert b"".join(conversion.lines([jsonl(row).strip()])) == jsonl(row)
    assert not conversion.formats and not conversion.problems


def test_only_the_answers_are_learned_and_tools_are_read() -> None:
    before = [USER, GOOD | {"weight": 1}, USER]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = {
        "input": {"messages": before, "tools": [TOOL], "parallel_tool_calls": False},
        "preferred_output": [called],
        "non_preferred_output": [BAD],
    }
    pair = read(row)
    assert pair.rejected is not None
    assert (pair.learned, pair.rejected.learned) == ((3,), (3,))
    assert pair.tools == pair.rejected.tools != ()
    texts = read({"prompt": "once", "chosen": " more", "rejected": " less"})
    assert texts.rejected is not None
    assert (texts.prompt, texts.completion, texts.rejected.completion) == ("once", " more", " less")


def chat(**changes: Any) -> dict[str, Any]:
    return OPENAI | {"input": {"messages": [USER], **changes}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (OPENAI | {"input": "u"}, "input must be an object"),
        (OPENAI | {"input": {"messages": []}}, "input.messages must be a list of messages"),
        (chat(messages=[USER] * 2048), "input.messages must be at most 2048"),
        (chat(messages=["u"]), "input.messages[0] must be an object"),
        (chat(messages=[{"role": "user", "content": 3}]), "input.messages[0].content must be a st"),
        (chat(tool_choice="auto"), "input.tool_choice is not a known key"),
        (chat(tools=[{"type": "x"}]), "input.tools[0] must be a function"),
        (OPENAI | {"margin": 0.5}, "margin is a key of preference tuning in a form that is not"),
        (OPENAI | {"score_chosen": 1}, "score_chosen is a key of preference tuning in a form"),
        (OPENAI | {"surprise": 1}, "surprise is not a known key"),
        (OPENAI | {"preferred_output": None}, "preferred_output must be a list with one message"),
        (OPENAI | {"preferred_output": [GOOD, GOOD]}, "preferred_output must be a list with one"),
        (OPENAI | {"preferred_output": [USER]}, "preferred_output[0] must be a message of the as"),
        (
            OPENAI | {"non_preferred_output": [BAD | {"content": [{"type": "image_url"}]}]},
            "non_preferred_output[0].content[0] is not text",
        ),
        (
            OPENAI | {"preferred_output": [GOOD | {"weight": 0}]},
            "preferred_output[0].weight must not be 0",
        ),
        (OPENAI | {"non_preferred_output": [GOOD]}, "non_preferred_output is the same as the bet"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER, BAD]}, "rejected must be a list"),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "prompt must begin with a mess"),
        (
            {"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]},
            "rejected must begin as `chosen` does",
        ),
        (
            {"prompt": "other", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "prompt is not a known key",
        ),
        ({"prompt": "u", "chosen": "a", "rejected": ["b"]}, "chosen must be a list of messages"),
        ({"prompt": "u", "chosen": "a", "rejected": "b", "x": 1}, "x is not a known key"),
        ({"prompt": "u", "chosen": "", "rejected": "b"}, "chosen must not be empty"),
        ({"chosen": "a", "rejected": "b"}, "chosen must be a list of messages"),
        ({"messages": [USER, GOOD], "rejected_response": 3}, "rejected_response must be a string"),
        ({"messages": [USER, GOOD], "rejected_response": ""}, "rejected_response.content must no"),
        ({"messages": [USER, GOOD], "rejected_response": "good"}, "rejected_response is the same"),
        ({"messages": [USER], "rejected_response": "b"}, "messages[0] must be a message of the a"),
        (
            {"messages": [USER, GOOD], "rejected_response": "b", "surprise": 1},
            "surprise is not a known key",
        ),
    ],
)
def test_a_fault_is_named_by_line_and_field(row: Any, expected: str) -> None:
    (problem,) = lint(jsonl(OPENAI, row)).problems
    assert str(problem).startswith(f"line 2: {expected}")


def test_a_file_has_pairs_or_chats() -> None:
    chat = {"messages": [USER, GOOD]}
    assert lint(jsonl(OPENAI, OPENAI)).problems == lint(jsonl(chat, chat)).problems == []
    (mixed,) = lint(jsonl(OPENAI, chat)).problems
    assert str(mixed).startswith("line 2 has one answer, but the rows before have two")
    (mixed,) = lint(jsonl(chat, OPENAI)).problems
    assert str(mixed).startswith("line 2 has two answers, but the rows before have one")


def test_a_pair_is_bounded_as_every_row() -> None:
    long = [{"role": "user", "content": "x" * MAX_LINE_BYTES}]
    (problem,) = lint(jsonl(chat(messages=long))).problems
    assert "is longer than" in problem.message
    deep = "[" * 5000
    (problem,) = lint(b'{"preferred_output": ' + deep.encode() + b"\n").problems
    assert problem.line == 1
