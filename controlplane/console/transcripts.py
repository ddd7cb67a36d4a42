"""Stored prompts and answers as text to read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from controlplane.requestlog.services import StoredWords


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text with its speaker."""

    speaker: str
    text: str


def prompt_passages(words: StoredWords) -> list[Passage]:
    """Return the prompt: a chat's messages, or one or several texts."""
    prompt = words.prompt
    if "messages" in prompt:
        return [_message(message) for message in prompt["messages"]]
    if "prompts" in prompt:
        return [
            Passage(speaker=f"prompt {number}", text=_text(part))
            for number, part in enumerate(prompt["prompts"], start=1)
        ]
    if "token_ids" in prompt:
        return [Passage(speaker="prompt, as token ids", text=_text(prompt["token_ids"]))]
    return [Passage(speaker="prompt", text=_text(prompt.get("text", "")))]


def answer_passages(words: StoredWords) -> list[Passage]:
    """Return the answers: one passage for each choice."""
    outputs = words.outputs
    if len(outputs) == 1:
        return [Passage(speaker="answer", text=outputs[0])]
    return [
        Passage(speaker=f"answer {number}", text=text)
        for number, text in enumerate(outputs, start=1)
    ]


def _message(message: dict[str, Any]) -> Passage:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [_text(part) for part in parts if part is not None]
    others = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value is not None
    }
    if others:  # tool calls, the id of the answered tool call, a name
        texts.append(json.dumps(others, indent=2, ensure_ascii=False))
    return Passage(speaker=str(message.get("role", "")), text="\n".join(texts))


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, list) and all(isinstance(item, int) for item in part):
        return " ".join(map(str, part))
    return json.dumps(part, indent=2, ensure_ascii=False)
