"""Describes tools to a base model, and makes the grammar of its calls.

If the chat template takes `tools`, it renders them as its authors intended. If not, a system
message describes them, and earlier calls and their results become plain messages. A grammar
enforces the same form of a call for all models: `CALL_BEGIN`, a JSON object with name and
arguments, which obey the function's schema, and `CALL_END`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from contract.patterns import not_beginning_with
from contract.protocol import CALL_BEGIN, CALL_END, GenerateJob
from contract.tool_calls import BLANKS
from engine.grammar_text import tool_calls

_INTRODUCTION = (
    "You can call functions. Each is described by a line of JSON:\n<tools>\n{tools}\n</tools>\n\n"
    "To call one, answer with nothing but its name and arguments as JSON, in this form:\n"
    + CALL_BEGIN
    + '{{"name": "function", "arguments": {{"argument": "value"}}}}'
    + CALL_END
)


def plain_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite a chat as plain messages, for a template that does not take tools."""
    plain = [_plain(message) for message in messages]
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(_line(tool["function"]) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{CALL_BEGIN}{_line(call['function'])}{CALL_END}" for call in message.get("tool_calls", ())
    ]
    text = "\n".join([content, *calls] if content else calls) if calls else content
    return {"role": message["role"], "content": text}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def calls_grammar(job: GenerateJob) -> str | None:
    """Return the Lark grammar of an answer that may call the job's tools; None: it may not."""
    if not job.tools:
        return None
    choice = job.tool_choice or "auto"
    names = [tool["function"]["name"] for tool in job.tools]
    functions = list(zip(names, job.tool_schemas, strict=True))
    if choice.startswith("="):
        functions = [function for function in functions if function[0] == choice[1:]]
    is_required = choice != "auto"
    return tool_calls(
        functions,
        begin=CALL_BEGIN,
        end=CALL_END,
        is_required=is_required,
        is_parallel=job.parallel_tool_calls and not choice.startswith("="),
        free_text=not_beginning_with(CALL_BEGIN.strip(), after=BLANKS),
        answer_schema=job.decoding_schema or job.json_schema,
    )
