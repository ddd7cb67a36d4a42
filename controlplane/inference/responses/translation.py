"""Translate a response's body into a chat's, and the names of fields in errors back."""

from __future__ import annotations

import json
import re
from typing import Any

from controlplane.errors import ApiError, InvalidRequest
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.schemas import (
    AllowedChoice,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    NamedChoice,
    ResponsesBody,
    TextFormat,
    text_of,
)
from controlplane.inference.schemas import ChatBody, SamplingBody

Json = dict[str, Any]

#: Fields that a chat has under the same name.
_SAME = (
    *SamplingBody.model_fields,
    *("model", "parallel_tool_calls", "store", "stream", "metadata", "service_tier"),
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the request as a chat. Raises InvalidRequest with a response's field names."""
    fields: Json = {name: getattr(body, name) for name in _SAME}
    if body.adapters is not None:
        fields["adapters"] = [part.model_dump(exclude_none=True) for part in body.adapters]
    fields["messages"] = _messages(body)
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.shows_logprobs or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        fields["tools"] = [_chat_tool(tool.model_dump(exclude_none=True)) for tool in body.tools]
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return parse_body(ChatBody, json.dumps(given).encode())
    except ApiError as error:
        raise in_our_words(error) from None


def _messages(body: ResponsesBody) -> list[Json]:
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "developer", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, FunctionCallItem):
            _add_call(messages, item)
        elif isinstance(item, FunctionOutputItem):
            content = text_of(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    if len(messages) <= bool(body.instructions):
        raise InvalidRequest(
            "'input' has nothing to answer: send text, or items of type message.", param="input"
        )
    return messages


def _add_call(messages: list[Json], item: FunctionCallItem) -> None:
    """Add a call to the chat's message that has the text and calls of the same answer."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _response_format(form: TextFormat) -> Json | None:
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {
        "name": form.name,
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict,
    }
    given = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": given}


def _tool_choice(choice: str | NamedChoice | AllowedChoice | None) -> Any:
    if isinstance(choice, NamedChoice):
        return _chat_tool(choice.model_dump())
    if isinstance(choice, AllowedChoice):
        tools = [_chat_tool(tool.model_dump()) for tool in choice.tools]
        return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _chat_tool(tool: Json) -> Json:
    return {"type": tool.pop("type"), "function": tool}


#: A chat's field -> a response's.
_NAMES = (
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^tools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
)


def in_our_words(error: ApiError) -> ApiError:
    """Return the error with the field's name in a response's body."""
    for pattern, name in _NAMES:
        if error.param is not None and pattern.match(error.param):
            ours = pattern.sub(name, error.param)
            error.message = error.message.replace(error.param, ours)
            error.param = ours
            break
    return error
