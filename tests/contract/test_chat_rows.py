"""The lint names every wrong line, and the trainer takes what it passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.chat_rows import MAX_LINE_BYTES, MAX_PROBLEMS, lint

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


GOOD = {"messages": [SYSTEM, USER, ASSISTANT]}


def test_a_good_dataset_has_rows_and_no_problems() -> None:
    content = jsonl(GOOD, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}) + b"\n \r\n"
    assert (lint(content).num_rows, lint(content).problems) == (2, [])
    assert lint(content.replace(b"\n", b"\r\n")).problems == []
    assert lint(content.rstrip()).num_rows == 2


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["messages"], "line 2: messages must be a list"),
        ({"messages": {}}, "line 2: messages must be a list"),
        ({"messages": []}, "line 2: messages must be a list"),
        ({"prompt": "u"}, "line 2: completion must be a string"),
        ({"prompt": "u", "completion": ""}, "line 2: completion must not be empty"),
        ({"messages": [USER, ASSISTANT], "functions": [{}]}, "line 2: functions is not supported"),
        ({"messages": [USER, ASSISTANT], "parallel_tool_calls": 1}, "line 2: parallel_tool_calls"),
        ({"messages": [USER, ASSISTANT], "tools": [{}]}, "line 2: tools[0] must be a function"),
        ({"messages": [USER, ASSISTANT], "tools": [TOOL, TOOL]}, "line 2: tools[1].function.name"),
        ({"messages": [USER, ASSISTANT | {"weight": 2}]}, "line 2: messages[1].weight must be 0"),
        ({"messages": [USER, ASSISTANT | {"weight": True}]}, "line 2: messages[1].weight must"),
        ({"messages": [USER | {"weight": 1}, ASSISTANT]}, "line 2: messages[0].weight is allowed"),
        ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "line 2: messages must have a message"),
        (
            {"messages": [USER, ASSISTANT | {"function_call": {"name": "f"}}]},
            "line 2: messages[1].function_call is not supported",
        ),
        (
            {"messages": [USER | {"tool_calls": [CALL]}, ASSISTANT]},
            "line 2: messages[0].tool_calls are allowed only",
        ),
        (
            {"messages": [USER, ASSISTANT, {"role": "tool", "tool_call_id": "c", "content": "1"}]},
            "line 2: messages[2].tool_call_id must be the id of an earlier",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [CALL | {"id": 1}]}]},
            "line 2: messages[1].tool_calls[0].id must",
        ),
        (
            {"messages": [USER, ASSISTANT | {"content": [{"type": "image_url"}]}]},
            "line 2: messages[1].content[0] must be a part of text",
        ),
        ({"messages": [USER, "a"]}, "line 2: messages[1] must be an object"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "line 2: messages[1].role must"),
        ({"messages": [USER, {"role": ["user"]}]}, "line 2: messages[1].role must be one of"),
        ({"messages": [USER, {"role": "assistant"}]}, "line 2: messages[1].content must be a str"),
        (
            {"messages": [USER, ASSISTANT | {"content": " "}]},
            "line 2: messages[1].content must not",
        ),
        ({"messages": [SYSTEM, ASSISTANT]}, "line 2: messages must begin with a user's"),
        ({"messages": [SYSTEM]}, "line 2: messages must begin with a user's"),
        ({"messages": [USER, USER]}, "line 2: messages must have a message of the assistant"),
    ],
)
def test_a_wrong_row_is_named_by_line_and_field(row: Any, expected: str) -> None:
    (problem,) = lint(jsonl(GOOD, row, GOOD)).problems
    assert str(problem).startswith(expected)


def test_rows_as_openai_has_them_are_good() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 1}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]}
    rows = [
        {"messages": [USER, called, result, ASSISTANT], "tools": [TOOL]},
        {
            "messages": [
                {"role": "developer", "content": "d"},
                USER,
                ASSISTANT | {"weight": 0},
                USER,
                ASSISTANT,
            ],
            "parallel_tool_calls": False,
        },
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]},
        {"prompt": "u", "completion": " a"},
    ]
    assert (lint(jsonl(*rows)).num_rows, lint(jsonl(*rows)).problems) == (4, [])


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    rows = [
        {"messages": [USER, ASSISTANT | {"content": text}]} for text in ("\ud83e\udd9c", "\ud83e")
    ]
    (problem,) = lint(jsonl(*rows)).problems
    assert str(problem).startswith("line 2 has half of a surrogate pair")


@pytest.mark.parametrize("depth", [62, 63, 64, 800])
def test_tools_are_not_nested_deeper_than_templates_write(depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": "deep"}}}
    row = jsonl({"messages": [USER, ASSISTANT], "tools": [tool]})
    found = lint(row.replace(b'"deep"', b"[" * depth + b"]" * depth)).problems
    told = "line 1: tools[0].function.parameters is nested deeper than 64 levels"
    assert [str(problem) for problem in found] == ([] if depth <= 63 else [told])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "line 2 is not JSON"),
        (b"\xff", "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is nested too deeply"),
        (b"1" * 10_000, "line 2 is not JSON"),
        (b'"' + b"a" * MAX_LINE_BYTES + b'"', "line 2 is longer than"),
    ],
    ids=["cut", "no-utf8", "deep", "huge-number", "long"],
)
def test_bytes_that_are_no_row_are_named_by_their_line(line: bytes, expected: str) -> None:
    (problem,) = lint(jsonl(GOOD) + line).problems
    assert str(problem).startswith(expected)


def test_a_file_of_another_kind_is_told_what_is_wanted() -> None:
    complaint = lint(b"question,answer\nhi,there\n").complaint
    assert complaint.startswith("line 1 is not JSON; line 2 is not JSON. The file is JSONL")
    assert complaint.count('{"messages":') == 1
    assert "char 0" not in complaint
    assert "Expecting" not in complaint
    assert "codec" not in lint(b"\xff\xfe\n").complaint


def test_it_gives_up_after_many_problems() -> None:
    assert len(lint(b"x\n" * 1000).problems) == MAX_PROBLEMS


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \r\n"])
def test_an_empty_file_has_a_problem_of_its_own(content: bytes) -> None:
    assert [str(problem) for problem in lint(content).problems] == ["the file has no rows"]


def test_the_trainer_takes_what_passes_and_no_more(tmp_path: Path) -> None:
    worker = pytest.importorskip("worker.training.chat_data")
    path = tmp_path / "rows.jsonl"
    rows = [
        GOOD,
        {"messages": [USER, ASSISTANT, USER]},
        {"messages": [USER]},
        {"messages": [ASSISTANT, USER]},
        {"messages": [USER, {"role": "tool", "content": "a"}]},
        {"messages": [USER, {"role": "assistant", "content": None}]},
        {"messages": [USER, ASSISTANT | {"weight": 0}]},
        {"prompt": "u", "completion": "a"},
        {"messages": []},
        [],
    ]
    for row in rows:
        path.write_bytes(jsonl(row))
        try:
            list(worker.read_rows(path))
            is_taken = True
        except worker.DatasetError:
            is_taken = False
        assert is_taken == (not lint(path.read_bytes()).problems), row
