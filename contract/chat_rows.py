"""Read chat JSONL, and say what is wrong with it, line by line.

A row is {"messages": [{"role": "system" | "user" | "assistant", "content": "…"}, …]}; the user
speaks first and the assistant at least once. The rules are the same at upload and in training.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

MAX_ROWS = 100_000
MAX_LINE_BYTES = 1 << 20
#: How many problems the lint finds before it stops.
MAX_PROBLEMS = 20
#: How many of them a refusal names.
_SHOWN_PROBLEMS = 5
_NO_JSON = "is not JSON"
_FORM = ' The file is JSONL, one chat a line: {"messages": [{"role": "user", "content": "…"}, …]}'
ROLES = ("system", "user", "assistant")

Chat = list[dict[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A fault, and its place. `line` counts from 1; 0 is the file as a whole."""

    line: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "the file"
        return f"{where}: {self.field} {self.message}" if self.field else f"{where} {self.message}"


@dataclasses.dataclass(frozen=True, slots=True)
class Lint:
    """The outcome of the lint; a dataset without problems is good."""

    num_rows: int
    problems: list[Problem]

    @property
    def complaint(self) -> str:
        """Write the first few problems in one sentence."""
        shown = "; ".join(str(problem) for problem in self.problems[:_SHOWN_PROBLEMS])
        more = "; and more" if len(self.problems) > _SHOWN_PROBLEMS else ""
        # A file of another kind, such as CSV, fails in each line; say once what is wanted.
        is_other = any(problem.message.startswith(_NO_JSON) for problem in self.problems)
        return f"{shown}{more}.{_FORM if is_other else ''}"


def lint(content: bytes) -> Lint:
    """Check every row, up to MAX_PROBLEMS problems. Blank lines are not rows."""
    return lint_lines(content.split(b"\n"))


def lint_lines(lines: Iterable[bytes]) -> Lint:
    """Do what `lint` does, with lines that need not all be in memory."""
    problems: list[Problem] = []
    num_rows = 0
    for row in read_rows(lines):
        num_rows += 1
        if isinstance(row, Problem):
            problems.append(row)
            if not row.line:
                num_rows = 0
        if len(problems) == MAX_PROBLEMS:
            break
    return Lint(num_rows, problems)


def read_rows(lines: Iterable[bytes]) -> Iterator[Chat | Problem]:
    """Yield each row's messages, or what is wrong with the row; blank lines are left out.

    Ends with a Problem after MAX_ROWS rows, and when there is no row at all.
    """
    num_rows = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        num_rows += 1
        if num_rows > MAX_ROWS:
            yield Problem(number, "", f"is past the limit of {MAX_ROWS} rows")
            return
        try:
            yield _chat(line)
        except _Wrong as wrong:
            yield Problem(number, *wrong.args)
    if not num_rows:
        yield Problem(0, "", "has no rows")


class _Wrong(Exception):
    """The row is not a chat; the arguments are the field and the message."""


def _chat(line: bytes) -> Chat:
    if len(line) > MAX_LINE_BYTES:
        raise _Wrong("", f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        row = json.loads(line)
    except RecursionError:
        raise _Wrong("", "is nested too deeply") from None
    except UnicodeDecodeError:
        raise _Wrong("", f"{_NO_JSON}, which is text in UTF-8") from None
    except ValueError:
        raise _Wrong("", _NO_JSON) from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise _Wrong("messages", "must be a list of messages")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not roles or roles[0] != "user":
        raise _Wrong("messages", "must begin with a user's message, after any of the system")
    if "assistant" not in roles:
        raise _Wrong("messages", "must have a message of the assistant: it is what is learned")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _check_message(field: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise _Wrong(field, "must be an object")
    if message.get("role") not in ROLES:
        raise _Wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str):
        raise _Wrong(f"{field}.content", "must be a string")
    if message["role"] == "assistant" and not content.strip():
        raise _Wrong(f"{field}.content", "must not be empty: it is what is learned")
