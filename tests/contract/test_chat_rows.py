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
        ({"prompt": "u", "completion": "a"}, "line 2: messages must be a list"),
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
        {"messages": []},
        [],
    ]
    for row in rows:
        path.write_bytes(jsonl(row))
        try:
            worker.read_chats(path)
            is_taken = True
        except worker.DatasetError:
            is_taken = False
        assert is_taken == (not lint(path.read_bytes()).problems), row
