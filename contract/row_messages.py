"""Check one row of a dataset, and bring it into the form in which serving hands a chat to a model.

A row is a chat, {"messages": […], "tools": […]}, as OpenAI defines it for fine-tuning, or a text
and its continuation, {"prompt": "…", "completion": "…"}. Developers' messages become the system's,
parts of a content become one text, and calls' arguments become objects: a test holds each against
what the gateway makes of the same chat. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from contract.strict_json import MAX_DEPTH, is_too_deep
from contract.tool_calls import CalledFunctions, read_arguments

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2048
#: Lists of one message, and functions of one row, have at most so many items.
MAX_ITEMS = 128
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LEARNED = "it is what is learned"


class WrongRow(Exception):
    """The row is none; the arguments are the field and the message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as a chat template, or a tokenizer, takes it.

    messages    of a chat; empty: the row is a completion
    learned     the places in `messages` of those that are learned, in order
    tools       that the chat's template is given
    prompt      of a completion, and `completion`, which is learned
    """

    messages: tuple[dict[str, Any], ...] = ()
    learned: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    completion: str = ""


def read_row(row: Any) -> Row:
    """Return the row of a JSON value. Raises WrongRow."""
    if isinstance(row, dict) and "messages" not in row and ("prompt" in row or "completion" in row):
        return _completion(row)
    given = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(given, list) or not given:
        raise WrongRow("messages", "must be a list of messages")
    if len(given) > MAX_MESSAGES:
        raise WrongRow("messages", f"must be at most {MAX_MESSAGES}, as in a request")
    if row.get("functions"):
        raise WrongRow("functions", "is not supported: write them as tools")
    if type(row.get("parallel_tool_calls")) not in (type(None), bool):
        raise WrongRow("parallel_tool_calls", "must be true or false")
    tools = _tools(row.get("tools"))
    called = CalledFunctions()
    messages = tuple(
        _message(f"messages[{index}]", message, called) for index, message in enumerate(given)
    )
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not roles or roles[0] != "user":
        raise WrongRow("messages", "must begin with a user's message, after any of the system")
    if "assistant" not in roles:
        raise WrongRow("messages", f"must have a message of the assistant: {_LEARNED}")
    learned = tuple(
        index
        for index, message in enumerate(given)
        if message["role"] == "assistant" and message.get("weight") != 0
    )
    if not learned:
        raise WrongRow("messages", "must have a message of the assistant whose weight is not 0")
    return Row(messages=messages, learned=learned, tools=tools)


def _completion(row: dict[str, Any]) -> Row:
    for name in ("prompt", "completion"):
        if not isinstance(row.get(name), str):
            raise WrongRow(name, "must be a string")
        if not row[name]:
            raise WrongRow(name, "must not be empty")
    return Row(prompt=row["prompt"], completion=row["completion"])


def _message(field: str, message: Any, called: CalledFunctions) -> dict[str, Any]:
    """Return a message for the chat template; add its calls to `called`."""
    if not isinstance(message, dict):
        raise WrongRow(field, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise WrongRow(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.get("function_call"):
        raise WrongRow(f"{field}.function_call", "is not supported: write it as tool_calls")
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise WrongRow(f"{field}.tool_calls", "are allowed only in the assistant's messages")
    _check_weight(f"{field}.weight", role, message.get("weight"))
    says_else = role == "assistant" and (calls or message.get("refusal"))
    content = _content(f"{field}.content", message.get("content"), is_needed=not says_else)
    if role == "assistant" and not content and message.get("refusal"):
        content = _content(f"{field}.refusal", message["refusal"], is_needed=True)
    if role == "assistant" and not calls and not content.strip():
        raise WrongRow(f"{field}.content", f"must not be empty: {_LEARNED}")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        read["tool_calls"] = _calls(f"{field}.tool_calls", calls)
        called.add(read["tool_calls"])
    if role == "tool":
        call_id = message.get("tool_call_id")
        name = called.name_of(call_id)
        if name is None:
            raise WrongRow(f"{field}.tool_call_id", "must be the id of an earlier tool call")
        read |= {"tool_call_id": call_id, "name": name}
    return read


def _check_weight(field: str, role: str, weight: Any) -> None:
    if weight is None:
        return
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise WrongRow(field, "must be 0 or 1")
    if weight and role != "assistant":
        raise WrongRow(field, "is allowed only in the assistant's messages")


def _content(field: str, content: Any, *, is_needed: bool) -> str:
    """Return the text of a content: a string, or parts of text, which are joined by lines."""
    if isinstance(content, str):
        return content
    if content is None and not is_needed:
        return ""
    if not isinstance(content, list):
        raise WrongRow(field, "must be a string, or a list of parts of text")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise WrongRow(f"{field}[{index}]", "must be a part of text")
        if part.get("type") != "text":
            raise WrongRow(f"{field}[{index}].type", "must be text: the models read text alone")
    return "\n".join(part["text"] for part in content)


def _calls(field: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_ITEMS:
        raise WrongRow(field, f"must be a list of at most {MAX_ITEMS} tool calls")
    read = []
    for index, call in enumerate(calls):
        where = f"{field}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise WrongRow(where, "must be the call of a function")
        if not isinstance(call.get("id"), str) or not 0 < len(call["id"]) <= 200:
            raise WrongRow(f"{where}.id", "must be a string of 1 to 200 characters")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise WrongRow(f"{where}.function.arguments", "must be a string with JSON")
        name = _function_name(f"{where}.function.name", function)
        told = {"name": name, "arguments": read_arguments(arguments)}
        read.append({"id": call["id"], "type": "function", "function": told})
    return read


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
        name = _function_name(f"{where}.function.name", function)
        if name in names:
            raise WrongRow(f"{where}.function.name", "is that of another tool, too")
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
    read["parameters"] = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    try:
        json.dumps(read, allow_nan=False)
    except ValueError:
        raise WrongRow(field, "must not have NaN or Infinity") from None
    return read
