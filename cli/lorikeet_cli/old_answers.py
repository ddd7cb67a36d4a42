"""Stored answers of the old model, as the cases of a suite."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorikeet_cli.errors import CliError

#: Largest number of cases in one version of a suite, and largest request that makes it, in bytes.
MAX_CASES = 2000
MAX_CASES_BYTES = 2_000_000
MAX_BYTES = 16 << 20
_MAX_NAMED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class OldAnswers:
    """Cases in the form that a suite takes, and the number of lines that are not chats of texts."""

    cases: list[dict[str, Any]]
    num_left_out: int


def read_answers(path: Path) -> OldAnswers:
    """Read JSONL: prompts in `messages`, the old answer in `answer` or as the last message.

    Raises CliError that names the lines that are neither.
    """
    cases: list[dict[str, Any]] = []
    num_left_out, broken = 0, []
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            case = _case(row)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
            broken.append(number)
            continue
        if case is None:
            num_left_out += 1
        else:
            cases.append(case)
    if broken:
        named = ", ".join(map(str, broken[:_MAX_NAMED])) + (" …" if broken[_MAX_NAMED:] else "")
        raise CliError(
            f'{path}: line {named}: a line is {{"messages": […], "answer": "…"}}, or a chat that '
            "ends with the old answer."
        )
    if not cases:
        raise CliError(f"{path} has no text answers to compare with.")
    if len(cases) > MAX_CASES:
        raise CliError(
            f"{path} has {len(cases)} answers; at most {MAX_CASES} can be compared. Remove some."
        )
    if len(json.dumps(cases)) > MAX_CASES_BYTES:
        raise CliError(f"{path} has more than {MAX_CASES_BYTES:,} bytes of answers. Remove some.")
    return OldAnswers(cases, num_left_out)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CliError(f"{path} has more than {MAX_BYTES >> 20} MiB. Remove some lines.")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.") from error


def _case(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line's case; None if it has tools or content that is not text.

    Raises KeyError, TypeError and the like for what is no such line.
    """
    messages, answer = list(row["messages"]), row.get("answer")
    if answer is None:
        last = messages.pop()
        if last["role"] != "assistant":
            raise ValueError("no answer")
        answer = last if last.get("tool_calls") else last["content"]
    if not messages or not all(isinstance(each["role"], str) for each in messages):
        raise ValueError("no prompt")
    text = _text(answer)
    if not text or any(each.get("tool_calls") or each["role"] == "tool" for each in messages):
        return None
    checks = ["exact", "similarity", *(["json_f1"] if _is_json(text) else [])]
    return {
        "messages": messages,
        "expected": text,
        "checks": [{"type": kind} for kind in checks],
        "slice": row.get("slice", ""),
    }


def _text(answer: Any) -> str:
    """Return an answer's text; empty if it is something else."""
    if isinstance(answer, dict):
        answer = None if answer.get("tool_calls") else answer.get("content")
    if isinstance(answer, list):
        parts = [part.get("text") for part in answer if part.get("type") == "text"]
        answer = "".join(parts) if len(parts) == len(answer) else None
    return answer if isinstance(answer, str) else ""


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False
