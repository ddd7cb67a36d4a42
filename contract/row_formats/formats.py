"""The formats of rows: how to recognise one, and how to convert its rows into rows of ours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from .chats import has_own_form, messages_of, text_of, tools_of
from .keys import (
    NO_ROW,
    PREFERENCE,
    Fields,
    NotConverted,
    is_pair,
    is_preference,
    says_nothing,
    shown,
)

Row = dict[str, Any]
_QUESTIONS = ("query", "question", "prompt", "input", "text_input")
_ANSWERS = ("response", "answer", "output")
_SYSTEMS = ("system", "system_prompt", "systemInstruction", "system_instruction")
_BEGIN, _END = "<|im_start|>", "<|im_end|>"


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A format by its name, and the function that converts one of its rows into a row of ours.

    `convert` raises NotConverted.
    """

    name: str
    convert: Callable[[Fields], Row]


def format_of(row: Any) -> Format | None:
    """Return the format of a row; None if it is one of ours, or of no known format."""
    if not isinstance(row, dict):
        return None
    keys = {name for name, value in row.items() if not says_nothing(value)}
    for name in ("conversations", "conversation"):
        if name in keys:
            return Format("ShareGPT", functools.partial(_turns, name))
    if "contents" in keys:
        return Format("Vertex AI", functools.partial(_turns, "contents"))
    if "messages" in keys:
        dialect = _dialect(row)
        return Format(dialect, functools.partial(_turns, "messages")) if dialect else None
    if any(isinstance(row.get(name), list) for name in ("prompt", "completion")):
        return Format("TRL", _prompt_and_completion)
    if "completion" in keys:
        return None
    if "instruction" in keys:
        return Format("Alpaca", _alpaca)
    if keys & {*_QUESTIONS} and keys & {*_ANSWERS}:
        return Format("questions and answers", _pair)
    if "text" in keys:
        is_chatml = isinstance(row["text"], str) and _BEGIN in row["text"]
        return Format("ChatML" if is_chatml else "plain text", _text)
    if keys & {"input_ids", "segments"}:
        return Format("token ids or segments of text", _tokens)
    return None


def converted(row: Any) -> tuple[str | None, list[Any]]:
    """Return the name of a row's format, and the converted rows; None if the row is one of ours.

    Raises NotConverted.
    """
    if isinstance(row, list):
        if row and is_turn(row[0]):
            return "a list of messages", [{"messages": messages_of(row, "messages")}]
        return "a JSON array", [made for each in row for made in converted(each)[1]]
    if not isinstance(row, dict):
        raise NotConverted("", NO_ROW)
    if is_pair(row):
        return None, [row]
    for name, value in row.items():
        if not says_nothing(value) and is_preference(name, value):
            raise NotConverted(shown(name), PREFERENCE)
    found = format_of(row)
    if found is not None:
        return found.name, [found.convert(Fields(row))]
    if not {"messages", "prompt", "completion"} & row.keys():
        raise NotConverted("", NO_ROW)
    return None, [row]


def is_turn(value: Any) -> bool:
    """Return whether a value is a message, and not a row."""
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def _dialect(row: Row) -> str | None:
    """Return the format of a row with `messages` that are not written as OpenAI's."""
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list):
        return None
    if not says_nothing(row.get("functions")):
        return "OpenAI's older functions"
    if not says_nothing(row.get("toolConfig")):
        return "Bedrock"
    if found := next(filter(None, map(has_own_form, messages)), None):
        return found
    for part in row["system"] if isinstance(row.get("system"), list) else ():
        if isinstance(part, dict) and "type" not in part:
            return "Bedrock"
    for tool in tools if isinstance(tools, list) else [tools]:
        if isinstance(tool, dict) and "input_schema" in tool:
            return "Anthropic"
        if isinstance(tool, str) or (isinstance(tool, dict) and "name" in tool):
            return "LLaMA-Factory"
    return "other names of the system's message" if {*_SYSTEMS[1:]} & row.keys() else None


def _turns(name: str, fields: Fields) -> Row:
    turns = fields.take(name)
    if isinstance(turns, list):
        turns = [each for turn in turns for each in _messages_of_exchange(turn)]
    return _chat(fields, messages_of(turns, name))


def _messages_of_exchange(turn: Any) -> list[Any]:
    """Return the two messages of a turn that is a question and its answer; else the turn."""
    for asked, answer in (("human", "assistant"), ("input", "output")):
        if isinstance(turn, dict) and turn.keys() == {asked, answer}:
            return [
                {"role": "user", "content": turn[asked]},
                {"role": "assistant", "content": turn[answer]},
            ]
    return [turn]


def _chat(fields: Fields, messages: list[dict[str, Any]]) -> Row:
    """Return a row of messages with what stands beside them."""
    system = fields.take(*_SYSTEMS)
    if system:
        if messages and messages[0]["role"] in ("system", "developer"):
            raise NotConverted(
                "system", "is given, and a message of the system too: remove one of them"
            )
        messages = [{"role": "system", "content": text_of(system, "system")}, *messages]
    row: Row = {"messages": messages}
    tools = [tool for name in ("tools", "functions", "toolConfig") for tool in _take(fields, name)]
    if tools:
        row["tools"] = tools
    return row | fields.take_all("parallel_tool_calls", "weight", "channel") | fields.rest()


def _take(fields: Fields, name: str) -> list[dict[str, Any]]:
    value = fields.take(name)
    return [] if not value else tools_of(value, name)


def _prompt_and_completion(fields: Fields) -> Row:
    """Convert two lists of messages; only the second is learned."""
    before = messages_of(fields.take("prompt"), "prompt")
    turns = fields.take("completion")
    if turns is None:
        raise NotConverted("completion", "is missing: it is the text to learn")
    for message in before:
        if message["role"] == "assistant":
            message["weight"] = 0
    return _chat(fields, _joined(before, turns))


def _joined(before: list[dict[str, Any]], turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise NotConverted("completion", "must be a list of messages, as the prompt is")
    return messages_of([*before, *turns], "messages")


def _alpaca(fields: Fields) -> Row:
    instruction = fields.take_text("instruction")
    given = fields.take("input", "context")
    answer = fields.take_text(*_ANSWERS)
    whole = fields.take("text")  # both are in Stanford's template, which rows of ours do not have
    if whole is not None and not _repeats(whole, instruction, answer):
        raise NotConverted(
            "text", "differs from the instruction and the output: remove one of them"
        )
    if not isinstance(given, str | None):
        raise NotConverted("input", "must be a string")
    return _exchange(fields, f"{instruction}\n{given}" if given else instruction, answer)


def _repeats(whole: Any, instruction: str, answer: str) -> bool:
    return isinstance(whole, str) and instruction in whole and whole.endswith(answer)


def _pair(fields: Fields) -> Row:
    question = fields.take_text(*_QUESTIONS)
    return _exchange(fields, question, fields.take_text(*_ANSWERS))


def _exchange(fields: Fields, question: str, answer: str) -> Row:
    """Return a row of one question and its answer, behind the pairs of a history."""
    history = fields.take("history") or []
    is_pairs = isinstance(history, list) and all(
        isinstance(pair, list) and [type(each) for each in pair] == [str, str] for pair in history
    )
    if not is_pairs:
        raise NotConverted("history", "must be a list of pairs of texts")
    messages = [
        {"role": role, "content": text}
        for pair in [*history, [question, answer]]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return _chat(fields, messages)


def _text(fields: Fields) -> Row:
    text = fields.take_text("text")
    before, *turns = text.split(_BEGIN)
    messages = []
    for turn in turns:
        role, _, said = turn.partition("\n")
        content, end, rest = said.partition(_END)
        if not end or rest.strip():
            break
        messages.append({"role": role, "content": content})
    if not turns or before.strip() or len(messages) < len(turns):
        raise NotConverted(
            "text",
            "does not say which part is learned: write a prompt and a completion, or messages",
        )
    return _chat(fields, messages_of(messages, "text"))


def _tokens(fields: Fields) -> Row:
    raise NotConverted("", "must be text: write a prompt and a completion, or messages")
