"""The lint of chat JSONL: what is wrong with a dataset, line by line. Pure.

A row is {"messages": [{"role": "system" | "user" | "assistant", "content": "…"}, …]}; the user
speaks first and the assistant at least once. The trainer takes exactly what passes here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

MAX_ROWS = 100_000
MAX_LINE_BYTES = 1 << 20
#: How many problems are looked for before the lint gives up.
MAX_PROBLEMS = 20
#: How many of them a refusal tells.
_SHOWN_PROBLEMS = 5
_NO_JSON = "is not JSON"
_FORM = ' The file is JSONL, one chat a line: {"messages": [{"role": "user", "content": "…"}, …]}'
ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where. `line` counts from 1; 0 is the file as a whole."""

    line: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "the file"
        return f"{where}: {self.field} {self.message}" if self.field else f"{where} {self.message}"


@dataclasses.dataclass(frozen=True, slots=True)
class Lint:
    """What the lint found; the dataset is good when there are no problems."""

    num_rows: int
    problems: list[Problem]

    @property
    def complaint(self) -> str:
        """The first few problems, in one sentence."""
        shown = "; ".join(str(problem) for problem in self.problems[:_SHOWN_PROBLEMS])
        more = "; and more" if len(self.problems) > _SHOWN_PROBLEMS else ""
        # A file of another kind, such as CSV, fails in each line; what is wanted is said once.
        is_other = any(problem.message.startswith(_NO_JSON) for problem in self.problems)
        return f"{shown}{more}.{_FORM if is_other else ''}"


def lint(content: bytes) -> Lint:
    """Check every row, up to MAX_PROBLEMS problems. Blank lines are not rows."""
    return lint_lines(content.split(b"\n"))


def lint_lines(lines: Iterable[bytes]) -> Lint:
    """As `lint`, of lines that need not all be in memory."""
    problems: list[Problem] = []
    num_rows = 0
    for number, line in enumerate(lines, start=1):
        if len(problems) >= MAX_PROBLEMS:
            break
        if not line.strip():
            continue
        num_rows += 1
        if num_rows > MAX_ROWS:
            problems.append(Problem(number, "", f"is past the limit of {MAX_ROWS} rows"))
            break
        problem = _row_problem(line)
        if problem is not None:
            problems.append(Problem(number, *problem))
    if num_rows == 0:
        problems.append(Problem(0, "", "has no rows"))
    return Lint(num_rows, problems)


def _row_problem(line: bytes) -> tuple[str, str] | None:
    """The (field, message) of a row that is no chat."""
    if len(line) > MAX_LINE_BYTES:
        return "", f"is longer than {MAX_LINE_BYTES} bytes"
    try:
        row = json.loads(line)
    except RecursionError:
        return "", "is nested too deeply"
    except UnicodeDecodeError:
        return "", f"{_NO_JSON}, which is text in UTF-8"
    except ValueError:
        return "", _NO_JSON
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        return "messages", "must be a list of messages"
    for index, message in enumerate(messages):
        problem = _message_problem(message)
        if problem is not None:
            return f"messages[{index}]{problem[0]}", problem[1]
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not roles or roles[0] != "user":
        return "messages", "must begin with the user's, after any of the system"
    if "assistant" not in roles:
        return "messages", "must have one of the assistant: it is what is learned"
    return None


def _message_problem(message: Any) -> tuple[str, str] | None:
    if not isinstance(message, dict):
        return "", "must be an object"
    if message.get("role") not in ROLES:
        return ".role", f"must be one of {', '.join(ROLES)}"
    content = message.get("content")
    if not isinstance(content, str):
        return ".content", "must be a string"
    if message["role"] == "assistant" and not content.strip():
        return ".content", "must not be empty: it is what is learned"
    return None
