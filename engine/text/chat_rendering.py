"""Renders a chat and its tools as a base model reads them, in serving and in training.

If the chat template takes `tools`, it renders them as its authors intended. If not, a system
message describes them, and earlier calls and their results become plain messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from contract.messages.protocol import CALL_BEGIN, CALL_END
from engine.text.chat_template import Chat
from engine.text.codec import TextCodec

_INTRODUCTION = (
    "You can call functions. Each is described by a line of JSON:\n<tools>\n{tools}\n</tools>\n\n"
    "To call one, answer with nothing but its name and arguments as JSON, in this form:\n"
    + CALL_BEGIN
    + '{{"name": "function", "arguments": {{"argument": "value"}}}}'
    + CALL_END
)


def render_chat(
    codec: TextCodec,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    *,
    options: dict[str, Any] | None = None,
    generation_prompt: bool = True,
) -> Chat:
    """Render a chat as the model reads it, in serving and in training. Raises PromptError."""
    if codec.takes_tools:
        return codec.render(messages, tools, options=options, generation_prompt=generation_prompt)
    plain = plain_messages(messages, tools)
    return codec.render(plain, options=options, generation_prompt=generation_prompt)


def plain_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite a chat as plain messages, for a template that does not take tools."""
    plain = [_plain(message) for message in messages]
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(_line(tool["function"]) for tool in tools))
        if plain and plain[0].get("role") == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{CALL_BEGIN}{_line(call['function'])}{CALL_END}"
        for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join([content, *calls] if content else calls)}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
