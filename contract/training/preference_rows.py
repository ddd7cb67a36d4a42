"""Check one row of preferences: a prompt, the better answer, and the worse one.

Three forms are read:

    OpenAI    {"input": {"messages": […], "tools": […]},
               "preferred_output": [message], "non_preferred_output": [message]}
    TRL       {"prompt": […], "chosen": [message], "rejected": [message]}
              {"chosen": […, message], "rejected": […, message]}, which begin alike
              {"prompt": "…", "chosen": "…", "rejected": "…"}
    ms-swift  {"messages": […, message], "rejected_response": "…"}

Each answer is read as the last message of a chat, by the rules for all chats.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from contract.row_formats.keys import SWITCHES
from contract.training.row_messages import Row, WrongRow, as_context, read_row

_PLACE = re.compile(r"messages(?:\[(\d+)\](.*))?", re.DOTALL)
_ONE = "must be a list with one message of the assistant"


def read_pair(row: Mapping[str, Any]) -> Row:
    """Return the row of the better answer, whose `rejected` is that of the worse.

    Raises WrongRow.
    """
    names = ("preferred_output", "non_preferred_output")
    if any(row.get(name) is not None for name in names):
        return _openai(row)
    if row.get("rejected_response") is not None:
        return _with_response(row)
    names = ("chosen", "rejected")
    for name in names:
        if row.get(name) is None:
            raise WrongRow(name, "is missing: a pair has a chosen and a rejected answer")
    if isinstance(row.get("prompt"), str) and all(isinstance(row[name], str) for name in names):
        return _texts(row)
    return _trl(row)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chat:
    """The messages before both answers, and what stands beside them.

    field   of the messages in the row
    beside  them: the keys of a chat, and others to be refused by name
    outer   the place of those keys
    """

    messages: Sequence[Any]
    field: str
    beside: Mapping[str, Any]
    outer: str = ""

    def answered(self, answer: Any, field: str) -> Row:
        """Return the chat with an answer, which is learned alone; `field` is the answer's."""
        if not isinstance(answer, dict) or answer.get("role") != "assistant":
            raise WrongRow(field, "must be a message of the assistant")
        for name in SWITCHES:
            if answer.get(name) is not None and not answer[name]:
                raise WrongRow(f"{field}.{name}", "must not be 0: the answer is what is learned")
        messages = [*map(as_context, self.messages), answer]
        try:
            return read_row({**self.beside, "messages": messages})
        except WrongRow as wrong:
            place, problem = wrong.args
            raise WrongRow(self._renamed(place, field), problem) from None

    def _renamed(self, place: str, answer: str) -> str:
        """Return the place in the pair of a place in the chat that was made of it."""
        found = _PLACE.fullmatch(place)
        if found is None:
            return f"{self.outer}{place}"
        if found[1] is None:
            return self.field
        index = int(found[1])
        if index == len(self.messages):
            return f"{answer}{found[2]}"
        return f"{self.field}[{index}]{found[2]}"


def _pair(chosen: Row, rejected: Row, field: str) -> Row:
    if chosen == rejected:
        raise WrongRow(field, "is the same as the better answer: remove the row")
    return dataclasses.replace(chosen, rejected=rejected)


def _openai(row: Mapping[str, Any]) -> Row:
    given = row.get("input")
    if not isinstance(given, dict):
        raise WrongRow("input", "must be an object with messages")
    _list_of_messages(given.get("messages"), "input.messages")
    beside = {name: value for name, value in given.items() if name != "messages"}
    chat = _Chat(given["messages"], "input.messages", beside, "input.")
    names = ("preferred_output", "non_preferred_output")
    _check_beside(row, ("input", *names))
    chosen, rejected = (_only(row.get(name), name) for name in names)
    return _pair(
        chat.answered(chosen, f"{names[0]}[0]"), chat.answered(rejected, f"{names[1]}[0]"), names[1]
    )


def _with_response(row: Mapping[str, Any]) -> Row:
    field, text = "rejected_response", row["rejected_response"]
    if not isinstance(text, str):
        raise WrongRow(field, "must be a string")
    messages = _list_of_messages(row.get("messages"), "messages")
    beside = {name: value for name, value in row.items() if name not in ("messages", field)}
    chat = _Chat(messages[:-1], "messages", beside)
    chosen = chat.answered(messages[-1], f"messages[{len(messages) - 1}]")
    return _pair(chosen, chat.answered({"role": "assistant", "content": text}, field), field)


def _trl(row: Mapping[str, Any]) -> Row:
    names = ("prompt", "chosen", "rejected")
    chosen, rejected = (_list_of_messages(row[name], name) for name in names[1:])
    beside = {name: value for name, value in row.items() if name not in names}
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        chat = _Chat(prompt, "prompt", beside)
        pair = _only(chosen, "chosen"), _only(rejected, "rejected")
        return _pair(
            chat.answered(pair[0], "chosen[0]"), chat.answered(pair[1], "rejected[0]"), "rejected"
        )
    before = chosen[:-1]
    if not before or rejected[:-1] != before:
        raise WrongRow("rejected", "must begin as `chosen` does, and differ in the last message")
    if prompt is not None:  # read_row compares it with what the user says first
        beside["prompt"] = prompt
    chat, last = _Chat(before, "chosen", beside), len(before)
    return _pair(
        chat.answered(chosen[-1], f"chosen[{last}]"),
        chat.answered(rejected[-1], f"rejected[{last}]"),
        "rejected",
    )


def _texts(row: Mapping[str, Any]) -> Row:
    """Return a pair of continuations of a text."""
    beside = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    read = []
    for name in ("chosen", "rejected"):
        try:
            read.append(read_row({**beside, "completion": row[name]}))
        except WrongRow as wrong:
            place, problem = wrong.args
            raise WrongRow(name if place == "completion" else place, problem) from None
    chosen, rejected = read
    return _pair(chosen, rejected, "rejected")


def _check_beside(row: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse keys that are not read and not neutral, as `read_row` does."""
    beside = {name: value for name, value in row.items() if name not in known}
    read_row({"prompt": "-", "completion": "-", **beside})


def _list_of_messages(given: Any, field: str) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise WrongRow(field, "must be a list of messages")
    return given


def _only(given: Any, field: str) -> Any:
    """Return the one message of an answer."""
    if not isinstance(given, list) or len(given) != 1:
        raise WrongRow(field, _ONE)
    return given[0]
