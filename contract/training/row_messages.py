"""Check one row of a dataset, and convert it into the form in which serving gives chats to a model.

A row is a chat, {"messages": […], "tools": […]}, as OpenAI defines it for fine-tuning, or a text
and its continuation, {"prompt": "…", "completion": "…"}. Developers' messages become the system's,
parts of a content become one text, and calls' arguments become objects: a test holds each against
what the gateway makes of the same chat.

Each key is read, or is one of `row_formats.keys.NEUTRAL`, or the row is refused: what is dropped
could have reversed what the row means. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

from contract.messages.tool_calls import CalledFunctions, read_arguments
from contract.row_formats.keys import (
    BOOLEAN_SWITCHES,
    MAX_ITEMS,
    MAX_MESSAGES,
    NEUTRAL,
    NO_ROW,
    NUMBER_SWITCHES,
    SWITCHES,
    part_refusal,
    refusal,
    says_nothing,
    shown,
)
from contract.strict_json import MAX_DEPTH, is_too_deep, read_value

ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LEARNED = "it is the text to learn"
_OBJECT = 'a JSON object, such as {"city": "Rome"}'
# `channel` groups losses in other trainers.
_CHAT_KEYS = ("messages", "tools", "system", "parallel_tool_calls", "weight", "channel")
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "function_call", *SWITCHES)


class WrongRow(Exception):
    """The value is not a row; the arguments are the field and the message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row in the form that a chat template, or a tokenizer, takes.

    messages    of a chat; empty: the row is a completion
    learned     the places in `messages` of those that are learned, in order
    num_added   1: the first of `messages` is the row's `system`, which is beside its own
    tools       that the chat's template is given
    unwrapped   the places of calls whose arguments were encoded twice
    prompt      of a completion, and `completion`, which is learned
    rejected    the same with a worse answer, of a pair that `preference_rows` reads; else None
    item        all fields of a prompt without an answer, for graders; else None
    """

    messages: tuple[dict[str, Any], ...] = ()
    learned: tuple[int, ...] = ()
    num_added: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    unwrapped: tuple[str, ...] = ()
    prompt: str = ""
    completion: str = ""
    rejected: Row | None = None
    item: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Return which of `KINDS` it is: the first that a method takes are its rows'."""
        if self.rejected is not None:
            return "pair"
        return "chat" if self.item is None else "prompt"


#: What rows of each kind have, and the method that takes them.
KINDS = {
    "chat": ("one answer", "supervised"),
    "pair": ("two answers", "dpo"),
    "prompt": ("no answer", "reinforcement"),
}


def method_fault(kind: str, method: str) -> str:
    """Return what is wrong with a row of this kind in a run of this method; "" if nothing is."""
    has, own = KINDS[kind]
    if own == method:
        return ""
    if kind == "chat":
        wanted = "pairs" if method == "dpo" else "prompts, which end with a message of the user"
        return f"has {has}: the method {method} takes {wanted}"
    return f"has {has}: train it with the method {own}"


@dataclasses.dataclass(slots=True)
class _Calls:
    """The functions of a chat, and those called so far by the ids of the calls."""

    functions: frozenset[str]
    called: CalledFunctions = dataclasses.field(default_factory=CalledFunctions)
    unwrapped: list[str] = dataclasses.field(default_factory=list)


def read_row(row: Any) -> Row:
    """Return the row of a JSON value. Raises WrongRow."""
    if isinstance(row, dict) and "messages" not in row and ("prompt" in row or "completion" in row):
        return _completion(row)
    if not isinstance(row, dict) or "messages" not in row:
        raise WrongRow("", NO_ROW)
    given = row["messages"]
    if not isinstance(given, list) or not given:
        raise WrongRow("messages", "must be a list of messages")
    if len(given) > MAX_MESSAGES:
        raise WrongRow("messages", f"must be at most {MAX_MESSAGES}, as in a request")
    if row.get("functions"):
        raise WrongRow("functions", "is not supported: write them as tools")
    if type(row.get("parallel_tool_calls")) not in (type(None), bool):
        raise WrongRow("parallel_tool_calls", "must be true or false")
    _check_row_weight(row.get("weight"))
    added = _system(row.get("system"), given)
    tools = _tools(row.get("tools"))
    calls = _Calls(frozenset(tool["function"]["name"] for tool in tools))
    messages, learned = [*added], []
    for index, message in enumerate(given):
        read, is_learned = _message(f"messages[{index}]", message, calls)
        if is_learned:
            learned.append(len(messages))
        messages.append(read)
    repeated = ("prompt",) if row.get("prompt") == _first_said(messages) else ()
    _check_keys("", row, (*_CHAT_KEYS, *repeated))
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        raise WrongRow("messages", "must begin with a message of the system or a user")
    if "assistant" not in roles:
        raise WrongRow("messages", f"must have a message of the assistant: {_LEARNED}")
    if not learned:
        raise WrongRow("messages", "must have a message of the assistant whose weight is not 0")
    return Row(
        messages=tuple(messages),
        learned=tuple(learned),
        num_added=len(added),
        tools=tools,
        unwrapped=tuple(calls.unwrapped),
    )


def is_prompt(row: Any) -> bool:
    """Return whether a row that is no chat to learn may be a prompt: it ends with no answer."""
    messages = row.get("messages") if isinstance(row, dict) else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") in ("user", "tool")


def read_prompt(row: dict[str, Any]) -> Row:
    """Return the row of a prompt, beside which there may be any fields. Raises WrongRow."""
    beside = {name: row[name] for name in _CHAT_KEYS if name in row and name != "weight"}
    messages = [*map(as_context, row["messages"]), {"role": "assistant", "content": "-"}]
    read = read_row({**beside, "messages": messages})
    return dataclasses.replace(read, messages=read.messages[:-1], learned=(), item=row)


def as_context(message: Any) -> Any:
    """Return a message of a prompt so that nothing of it is learned."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    return {name: value for name, value in message.items() if name not in SWITCHES} | {"weight": 0}


def _completion(row: dict[str, Any]) -> Row:
    for name in ("prompt", "completion"):
        if not isinstance(row.get(name), str):
            raise WrongRow(name, "must be a string")
        if not row[name]:
            raise WrongRow(name, "must not be empty")
    _check_row_weight(row.get("weight"))
    _check_keys("", row, ("prompt", "completion", "weight", "channel"))
    return Row(prompt=row["prompt"], completion=row["completion"])


def _check_keys(where: str, given: dict[str, Any], known: Iterable[str]) -> None:
    """Refuse a key that is not read, unless it is neutral or has an empty value."""
    for name, value in given.items():
        if name not in known and name not in NEUTRAL and not says_nothing(value):
            field = f"{where}.{shown(name)}" if where else shown(name)
            raise WrongRow(field, refusal(name, value))


def _check_row_weight(weight: Any) -> None:
    if weight is not None and (type(weight) not in (int, float) or weight != 1):
        raise WrongRow(
            "weight",
            "must be 1, because rows have no weights here: remove the row, or repeat it",
        )


def _system(system: Any, messages: list[Any]) -> list[dict[str, Any]]:
    """Return the message for a `system` key beside the messages."""
    if says_nothing(system) or system == "":
        return []
    first = messages[0].get("role") if isinstance(messages[0], dict) else None
    if first in ("system", "developer"):
        raise WrongRow("system", "is given, and a message of the system too: remove one of them")
    return [{"role": "system", "content": _content("system", system, is_needed=True)}]


def _first_said(messages: list[dict[str, Any]]) -> str | None:
    return next((each["content"] for each in messages if each["role"] == "user"), None)


def _message(field: str, message: Any, calls: _Calls) -> tuple[dict[str, Any], bool]:
    """Return a message for the chat template, and whether it is learned."""
    if not isinstance(message, dict):
        raise WrongRow(field, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise WrongRow(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.get("function_call"):
        raise WrongRow(f"{field}.function_call", "is not supported: write it as tool_calls")
    called = message.get("tool_calls") or []
    if called and role != "assistant":
        raise WrongRow(f"{field}.tool_calls", "are allowed only in the assistant's messages")
    is_learned = _is_learned(field, role, message)
    refused = message.get("refusal") if role == "assistant" else None
    content = _content(
        f"{field}.content", message.get("content"), is_needed=not called and not refused, role=role
    )
    if refused:
        if content:
            raise WrongRow(f"{field}.refusal", "is given, and a content too: remove one of them")
        content = _content(f"{field}.refusal", refused, is_needed=True)
    if role == "assistant" and not called and not content.strip():
        raise WrongRow(f"{field}.content", f"must not be empty: {_LEARNED}")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if thought := _thought(f"{field}.reasoning_content", role, message):
        read["reasoning_content"] = thought
    if called:
        read["tool_calls"] = _calls(f"{field}.tool_calls", called, calls, is_learned=is_learned)
    own = {"assistant": ("refusal", "reasoning_content"), "tool": ("tool_call_id",)}.get(role, ())
    _check_keys(field, message, (*_MESSAGE_KEYS, *own))
    if role == "tool":
        read |= _answered(field, message, calls)
    elif type(message.get("name")) not in (type(None), str):
        raise WrongRow(f"{field}.name", "must be a string")
    return read, is_learned


def _thought(field: str, role: str, message: dict[str, Any]) -> str:
    """Return the thought before an answer; "" if there is none."""
    thought = message.get("reasoning_content") or ""
    if not isinstance(thought, str):
        raise WrongRow(field, "must be a string")
    if thought and role != "assistant":
        raise WrongRow(field, "is allowed only in the assistant's messages")
    return thought


def _answered(field: str, message: dict[str, Any], calls: _Calls) -> dict[str, str]:
    """Return the call that a tool's message answers."""
    call_id = message.get("tool_call_id")
    name = calls.called.name_of(call_id)
    if name is None:
        raise WrongRow(f"{field}.tool_call_id", "must be the id of an earlier tool call")
    if message.get("name") not in (None, "", name):
        raise WrongRow(f"{field}.name", f"must be the name of the called function, {name}")
    return {"tool_call_id": str(call_id), "name": name}


def _is_learned(field: str, role: str, message: dict[str, Any]) -> bool:
    """Return whether a message is learned, by its `weight` or another trainer's name for it."""
    said = {name: message[name] for name in SWITCHES if message.get(name) is not None}
    for name, value in said.items():
        if name in BOOLEAN_SWITCHES and not isinstance(value, bool):
            raise WrongRow(f"{field}.{name}", "must be true or false")
        if name in NUMBER_SWITCHES and (type(value) not in (int, float) or value not in (0, 1)):
            raise WrongRow(f"{field}.{name}", "must be 0 or 1")
        if value and role != "assistant":
            raise WrongRow(f"{field}.{name}", "is allowed only in the assistant's messages")
    if len({bool(value) for value in said.values()}) > 1:
        raise WrongRow(
            field,
            f"contradicts another key about whether the message is learned: {', '.join(said)}",
        )
    return role == "assistant" and all(said.values())


def _content(field: str, content: Any, *, is_needed: bool, role: str = "system") -> str:
    """Return the text of a content: a string, or parts of text, which are joined by lines.

    The assistant's may be refusals, which are what it says, too.
    """
    if isinstance(content, str):
        return content
    if content is None and not is_needed:
        return ""
    if not isinstance(content, list):
        raise WrongRow(field, "must be a string, or a list of parts of text")
    texts = []
    for index, part in enumerate(content):
        place = f"{field}[{index}]"
        if not isinstance(part, dict):
            raise WrongRow(place, "must be a part of text")
        kind = part.get("type")
        if kind != "text" and (kind != "refusal" or role != "assistant"):
            raise WrongRow(place, part_refusal(part))
        if not isinstance(part.get(kind), str):
            raise WrongRow(f"{place}.{kind}", "must be a string")
        _check_keys(place, part, ("type", kind))
        texts.append(part[kind])
    return "\n".join(texts)


def _calls(field: str, given: Any, calls: _Calls, *, is_learned: bool) -> list[dict[str, Any]]:
    if not isinstance(given, list) or len(given) > MAX_ITEMS:
        raise WrongRow(field, f"must be a list of at most {MAX_ITEMS} tool calls")
    read = []
    for index, call in enumerate(given):
        where = f"{field}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise WrongRow(where, "must be the call of a function")
        if not isinstance(call.get("id"), str) or not 0 < len(call["id"]) <= 200:
            raise WrongRow(f"{where}.id", "must be a string of 1 to 200 characters")
        _check_keys(where, call, ("id", "type", "function"))
        _check_keys(f"{where}.function", function, ("name", "arguments"))
        name = _function_name(f"{where}.function.name", function)
        place, text = f"{where}.function.arguments", function.get("arguments")
        if not isinstance(text, str):
            raise WrongRow(place, "must be a string with JSON")
        arguments = read_arguments(text)  # as serving does, of what it is given
        if is_learned:
            if name not in calls.functions:
                raise WrongRow(
                    f"{where}.function.name", "must be the name of one of the row's tools"
                )
            arguments, is_unwrapped = _learned_arguments(place, text)
            calls.unwrapped += [place] if is_unwrapped else []
        told = {"name": name, "arguments": arguments}
        read.append({"id": call["id"], "type": "function", "function": told})
    calls.called.add(read)
    return read


def _learned_arguments(field: str, text: str) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a learned call as an object, and whether they were encoded twice.

    Serving makes a model write an object: nothing else may be learned.
    """
    try:
        value = read_value(text)
        if is_unwrapped := isinstance(value, str):
            value = read_value(value)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise WrongRow(field, "has half of a surrogate pair, which is not a character") from None
    except ValueError as error:
        told = str(error).partition(":")[0]
        raise WrongRow(field, f"must be {_OBJECT}: it {told}") from None
    if not isinstance(value, dict):
        raise WrongRow(field, f"must be {_OBJECT}")
    if is_too_deep(value):
        raise WrongRow(field, f"is nested deeper than {MAX_DEPTH} levels")
    return value, is_unwrapped


def _function_name(field: str, function: dict[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise WrongRow(field, "must be 1 to 64 letters, digits, _ or -")
    return name


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_ITEMS:
        raise WrongRow("tools", f"must be a list of at most {MAX_ITEMS} tools")
    read, names = [], set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise WrongRow(where, "must be a function")
        _check_keys(where, tool, ("type", "function"))
        name = _function_name(f"{where}.function.name", function)
        if name in names:
            raise WrongRow(f"{where}.function.name", "is also the name of another tool")
        names.add(name)
        read.append({"type": "function", "function": _function(f"{where}.function", function)})
    return tuple(read)


def _function(field: str, function: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {"name": function["name"]}
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise WrongRow(f"{field}.description", "must be a string")
    if description:
        read["description"] = description
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
    ):
        raise WrongRow(f"{field}.parameters", "must be the JSON schema of an object")
    if is_too_deep(parameters):
        raise WrongRow(f"{field}.parameters", f"is nested deeper than {MAX_DEPTH} levels")
    if type(function.get("strict")) not in (type(None), bool):
        raise WrongRow(f"{field}.strict", "must be true or false")
    _check_keys(field, function, ("name", "description", "parameters", "strict"))
    read["parameters"] = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return read
