"""Messages, content blocks, calls and tools of other formats, in OpenAI's form."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ..strict_json import read_value
from .keys import (
    MAX_ITEMS,
    MAX_MESSAGES,
    NEUTRAL,
    SWITCHES,
    Fields,
    NotConverted,
    json_text,
    part_refusal,
    says_nothing,
)

#: Other formats' names of the roles, in lower case; "call" is a turn whose text is tool calls.
ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "customer"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
_KEPT = (*SWITCHES, "name", "refusal", "reasoning_content", "tool_call_id")
_TEXTS = ("text", "input_text", "output_text")


@dataclasses.dataclass(slots=True)
class _Blocks:
    """Reads the blocks of one content; a message of ours has results, text and calls in this order.

    Raises NotConverted for another order.
    """

    where: str
    texts: list[str] = dataclasses.field(default_factory=list)
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add_text(self, text: str) -> None:
        self._check(not self.calls)
        self.texts.append(text)

    def add_result(self, result: dict[str, Any]) -> None:
        self._check(not self.calls and not self.texts)
        self.results.append(result)

    def _check(self, is_in_order: bool) -> None:
        if not is_in_order:
            raise NotConverted(
                self.where, "must not have text after a call or before a tool's result"
            )


def messages_of(turns: Any, where: str) -> list[dict[str, Any]]:
    """Return OpenAI's messages for a chat's turns. Raises NotConverted."""
    if not isinstance(turns, list):
        raise NotConverted(where, "must be a list of messages")
    found: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        place = f"{where}[{index}]"
        role, messages = _messages(place, turn)
        last = found[-1] if found else {}
        if role == "call" and last.get("role") == "assistant":
            # Calls that follow a text or other calls belong to the same answer.
            if any(last.get(name) != messages[0].get(name) for name in SWITCHES):
                raise NotConverted(
                    place, "differs from the answer that it belongs to in whether it is learned"
                )
            last["tool_calls"] = [*last.get("tool_calls", ()), *messages[0]["tool_calls"]]
        else:
            found += messages
        num_calls = len(found[-1].get("tool_calls", ())) if found else 0
        if len(found) > MAX_MESSAGES or num_calls > MAX_ITEMS:
            raise NotConverted(
                place,
                f"is above the limit of {MAX_MESSAGES} messages, or of {MAX_ITEMS} calls in one",
            )
    _link_results(found)
    return found


def _messages(where: str, turn: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return a turn's role and its messages."""
    fields = Fields(turn, where)
    given = fields.take_text("role", "from", "author")
    role = ROLES.get(given.strip().lower())
    if role is None:
        raise NotConverted(f"{where}.role", "is not a role that is known here")
    is_gemini = isinstance(turn.get("parts"), list | dict)
    content = fields.take("content", "value", "parts")
    content = [content] if is_gemini and isinstance(content, dict) else content
    calls = _calls(fields)
    kept = fields.take_all(*_KEPT) | fields.rest()
    if role == "call":
        content, calls = None, calls + _calls_of_text(where, content)
    blocks = _Blocks(where)
    if isinstance(content, list):
        blocks = _blocks(where, content)
        texts = ["".join(blocks.texts)] if is_gemini and blocks.texts else blocks.texts
        parts = [{"type": "text", "text": text} for text in texts]
        content = texts[0] if len(texts) == 1 else parts or None
    calls += blocks.calls
    if calls and role not in ("assistant", "call"):
        raise NotConverted(where, "has a call, but only the assistant calls functions")
    results = [{"role": "tool", **result} for result in blocks.results]
    if results and content is None:
        return role, [{**result, **kept} for result in results]
    if results and (role == "assistant" or set(kept) - NEUTRAL):
        raise NotConverted(where, "must not have a tool's result together with text")
    message = {"role": "assistant" if role == "call" else role, "content": content, **kept}
    if calls:
        message["tool_calls"] = calls
    return role, [*results, message]


def _blocks(where: str, content: list[Any]) -> _Blocks:
    found = _Blocks(where)
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        fields = Fields(block, place)
        kind = fields.take("type")
        if kind in _TEXTS or (kind is None and isinstance(block.get("text"), str)):
            found.add_text(fields.take_text("text", "value"))
        elif kind in ("tool_call", "function_call") and isinstance(block.get("value"), str):
            found.calls += _calls_of_text(place, fields.take("value"))
        elif kind == "tool_use":
            found.calls.append(_call(fields))
        elif kind == "tool_result":
            found.add_result(_result(fields))
        elif inner := fields.take("toolUse", "functionCall", "function_call"):
            found.calls.append(_call(Fields(inner, place)))
        elif inner := fields.take("toolResult", "functionResponse", "function_response"):
            found.add_result(_result(Fields(inner, place)))
        else:
            raise NotConverted(place, part_refusal(block))
        fields.rest()
    return found


def _calls(fields: Fields) -> list[dict[str, Any]]:
    """Take a message's calls, in OpenAI's current form or the older one."""
    calls = fields.take("tool_calls") or []
    if not isinstance(calls, list):
        raise NotConverted(fields.place("tool_calls"), "must be a list of tool calls")
    found = []
    for index, call in enumerate(calls):
        place = f"{fields.place('tool_calls')}[{index}]"
        outer = Fields(call, place)
        kind = outer.take("type")
        if kind not in (None, "function"):
            raise NotConverted(f"{place}.type", "must be function")
        function = outer.take("function")
        inner = outer if function is None else Fields(function, f"{place}.function")
        made = _call(inner, call_id=outer.take("id"))
        outer.rest()
        found.append(made)
    if (before := fields.take("function_call")) is not None:
        found.append(_call(Fields(before, fields.place("function_call"))))
    return found


def _calls_of_text(where: str, text: Any) -> list[dict[str, Any]]:
    """Return the calls in a turn's text: an object with a name and arguments, or several."""
    try:
        told = read_value(text) if isinstance(text, str) else text
    except ValueError as error:
        raise NotConverted(where, f"must be a call as JSON: it {error}") from error
    return [_call(Fields(each, where)) for each in (told if isinstance(told, list) else [told])]


def _call(fields: Fields, *, call_id: Any = None) -> dict[str, Any]:
    """Take a call; it gets no id here if it has none."""
    if call_id is None:
        call_id = fields.take("id", "toolUseId")
    if not isinstance(call_id, str | None):
        raise NotConverted(fields.place("id"), "must be a string")
    name = fields.take_text("name")
    arguments = fields.take("arguments", "input", "args", "parameters")
    fields.rest()
    text = arguments if isinstance(arguments, str) else json_text(arguments or {})
    made = {"type": "function", "function": {"name": name, "arguments": text}}
    return made if call_id is None else {"id": call_id, **made}


def _result(fields: Fields) -> dict[str, Any]:
    """Take a tool's result, as the fields of a tool's message."""
    kept = {"tool_call_id": fields.take("tool_use_id", "toolUseId", "id")}
    kept |= fields.take_all("name")
    if fields.take("is_error") or fields.take("status") == "error":
        raise NotConverted(fields.place("is_error"), "is not a known key: write it into the result")
    content = fields.take("content", "response")
    if isinstance(content, list):
        content = [_result_part(fields, part) for part in content]
    elif content is not None and not isinstance(content, str):
        content = json_text(content)
    fields.rest()
    told = {"content": content or "", **kept}
    return {name: value for name, value in told.items() if value is not None}


def _result_part(fields: Fields, part: Any) -> dict[str, str]:
    inner = Fields(part, fields.place("content"))
    kind = inner.take("type")
    if (value := inner.take("json")) is not None:
        text = json_text(value)
    elif kind in (None, "text"):
        text = inner.take_text("text")
    else:
        raise NotConverted(fields.place("content"), part_refusal(part))
    inner.rest()
    return {"type": "text", "text": text}


def _link_results(messages: list[dict[str, Any]]) -> None:
    """Give ids to calls that have none, and to tools' messages the ids of their calls."""
    known = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    fresh = (name for name in map("call_{}".format, itertools.count()) if name not in known)
    waiting: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            message["tool_calls"] = waiting = [{"id": next(fresh), **call} for call in calls]
            waiting = list(waiting)
        if message["role"] != "tool":
            continue
        call = next((call for call in waiting if _is_answered(call, message)), None)
        if call is not None:
            waiting.remove(call)
            message["tool_call_id"] = call["id"]
        elif "tool_call_id" not in message:
            raise NotConverted(
                f"messages[{index}]",
                "is a tool's message, but there is no earlier call that it answers",
            )


def _is_answered(call: dict[str, Any], message: dict[str, Any]) -> bool:
    name = call["function"]["name"]
    is_its_id = message.get("tool_call_id", call["id"]) == call["id"]
    return bool(is_its_id and message.get("name", name) == name)


def text_of(value: Any, where: str) -> str:
    """Return the text of a system's instruction: a string, or blocks or parts of text."""
    if isinstance(value, dict):
        fields = Fields(value, where)
        fields.take("role")
        value = fields.take("parts", "content")
        fields.rest()
        value = [value] if isinstance(value, dict) else value
    if isinstance(value, list):
        blocks = _blocks(where, value)
        if blocks.calls or blocks.results:
            raise NotConverted(where, "must be text")
        return "\n".join(blocks.texts)
    if not isinstance(value, str):
        raise NotConverted(where, "must be text")
    return value


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return OpenAI's tools for those of another format, which may be a text of JSON."""
    if isinstance(value, str):
        try:
            value = read_value(value)
        except ValueError as error:
            raise NotConverted(where, f"must be a list of tools: it {error}") from error
    if isinstance(value, dict) and "tools" in value:  # Bedrock's toolConfig
        fields = Fields(value, where)
        value = fields.take("tools")
        fields.rest()
    if not isinstance(value, list):
        raise NotConverted(where, "must be a list of tools")
    return [tool for index, each in enumerate(value) for tool in _tools(each, f"{where}[{index}]")]


def _tools(value: Any, where: str) -> Iterator[dict[str, Any]]:
    if isinstance(value, str):
        yield from tools_of(f"[{value}]", where)
        return
    fields = Fields(value, where)
    declared = fields.take("functionDeclarations", "function_declarations")
    if declared is not None:
        fields.rest()
        yield from tools_of(declared, where)
        return
    kind = fields.take("type")
    if kind not in (None, "function", "custom"):
        raise NotConverted(f"{where}.type", "must be function")
    inner = fields.take("function", "toolSpec")
    of = fields if inner is None else Fields(inner, where)
    function = {"name": of.take_text("name")} | of.take_all("description", "strict")
    parameters = of.take("parameters", "input_schema", "inputSchema", "parametersJsonSchema")
    if isinstance(parameters, dict) and set(parameters) == {"json"}:
        parameters = parameters["json"]
    of.rest()
    fields.rest()
    if parameters is not None:
        function["parameters"] = _lower_types(parameters)
    yield {"type": "function", "function": function}


def _lower_types(schema: Any) -> Any:
    """Return a schema with JSON schema's names of types: Vertex AI writes them as OBJECT."""
    if isinstance(schema, list):
        return [_lower_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _lower_types(value) for name, value in schema.items()}
    if isinstance(made.get("type"), str) and made["type"].isupper():
        made["type"] = made["type"].lower()
    return made


def has_own_form(message: Any) -> str | None:
    """Return the other format in which a message of an OpenAI chat is written; None: OpenAI's."""
    if not isinstance(message, dict):
        return None
    role, content = message.get("role"), message.get("content")
    if "from" in message or "author" in message:
        return "ShareGPT" if "from" in message else "PaLM"
    if isinstance(message.get("parts"), list):
        return "Vertex AI"
    if role == "function" or not says_nothing(message.get("function_call")):
        return "OpenAI's older functions"
    if isinstance(role, str) and ROLES.get(role.strip().lower(), role) != role:
        return f"other roles ({role.strip()[:20]})"
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if part.get("type") in ("tool_use", "tool_result"):
            return "Anthropic"
        if "toolUse" in part or "toolResult" in part or ("text" in part and "type" not in part):
            return "Bedrock"
        if "value" in part:
            return "LLaMA-Factory"
    calls = message.get("tool_calls")
    is_trl = any(_lacks_form(call) for call in calls) if isinstance(calls, list) else False
    if is_trl or (role == "tool" and message.get("tool_call_id") is None):
        return "TRL"
    return None


def _lacks_form(call: Any) -> bool:
    """Return whether a call has no id, or arguments that are no text."""
    if not isinstance(call, dict):
        return False
    function = call.get("function", call)
    return "id" not in call or (
        isinstance(function, dict) and isinstance(function.get("arguments"), dict)
    )
