"""Rows of public formats: named, and converted without loss, or refused by line and name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.row_formats import keys
from contract.row_formats.conversion import Conversion
from contract.training.chat_rows import lint
from contract.training.row_messages import read_row

S, U, A = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}
LAND = {"name": "land", "description": "Lands.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LAND}]
NAMED = {"name": "land", "arguments": {"x": "é"}}
CALL = {"type": "function", "function": {"name": "land", "arguments": '{"x": "é"}'}}


def chat(*messages: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"messages": list(messages), **beside}


def called(call_id: str = "call_0", content: str | None = None) -> list[dict[str, Any]]:
    """A chat with a call, what came of it, and the answer, as OpenAI writes it."""
    call = {"role": "assistant", "content": content, "tool_calls": [{"id": call_id, **CALL}]}
    return [U, call, {"role": "tool", "tool_call_id": call_id, "content": "ok"}, A]


def human(text: str = "u") -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str = "a", **beside: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": text, **beside}


def gemini(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def converted(*rows: Any) -> tuple[list[Any], Conversion]:
    conversion = Conversion()
    lines = conversion.lines(json.dumps(row).encode() for row in rows)
    return [json.loads(line) for line in lines], conversion


USE = {"type": "tool_use", "id": "tu", "name": "land", "input": {"x": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "tu", "content": "ok"}
BEDROCK_USE = {"toolUse": {"toolUseId": "tu", "name": "land", "input": {"x": "é"}}}
BEDROCK_RESULT = {"toolResult": {"toolUseId": "tu", "content": [{"text": "ok"}]}}
BEDROCK_TOOL = {"toolSpec": {**LAND, "inputSchema": {"json": PARAMETERS}}}
del BEDROCK_TOOL["toolSpec"]["parameters"]
GEMINI_SCHEMA = {"type": "OBJECT", "properties": {"x": {"type": "STRING"}}}
FORMATS: list[tuple[str, Any, dict[str, Any]]] = [
    ("ShareGPT", {"conversations": [human(), gpt()]}, chat(U, A)),
    (
        "ShareGPT",
        {"id": "7", "system": "s", "conversations": [human(), gpt(weight=0), human(), gpt()]},
        chat(S, U, A | {"weight": 0}, U, A),
    ),
    (
        "ShareGPT",
        {
            "conversations": [
                human(),
                {"from": "function_call", "value": json.dumps(NAMED)},
                {"from": "observation", "value": "ok"},
                gpt(),
            ],
            "tools": json.dumps([LAND]),
        },
        chat(*called(), tools=TOOLS),
    ),
    ("ShareGPT", {"conversations": [U, A]}, chat(U, A)),
    (
        "ShareGPT",
        {"system": "s", "conversation": [{"human": "u", "assistant": "a"}]},
        chat(S, U, A),
    ),
    ("ShareGPT", {"source": "x", "conversation": [{"input": "u", "output": "a"}]}, chat(U, A)),
    ("ShareGPT", chat(human(), gpt()), chat(U, A)),
    ("Alpaca", {"instruction": "u", "input": "", "output": "a"}, chat(U, A)),
    (
        "Alpaca",
        {"instruction": "u", "input": "v", "output": "a", "system": "s", "history": [["u", "a"]]},
        chat(S, U, A, {"role": "user", "content": "u\nv"}, A),
    ),
    ("Alpaca", {"instruction": "u", "output": "a", "text": "### u\n\n### a"}, chat(U, A)),
    ("Alpaca", {"instruction": "u", "context": "", "response": "a", "category": "q"}, chat(U, A)),
    (
        "Vertex AI",
        {
            "systemInstruction": gemini("system", {"text": "s"}),
            "contents": [
                gemini("user", {"text": "u"}),
                gemini("model", {"functionCall": {"name": "land", "args": {"x": "é"}}}),
                gemini("user", {"functionResponse": {"name": "land", "response": {"ok": 1}}}),
                gemini("model", {"text": "a"}),
            ],
            "tools": [{"functionDeclarations": [LAND | {"parameters": GEMINI_SCHEMA}]}],
        },
        chat(
            S,
            *called()[:2],
            {"role": "tool", "tool_call_id": "call_0", "content": '{"ok": 1}'},
            A,
            tools=TOOLS,
        ),
    ),
    (
        "Vertex AI",
        {"contents": [gemini("user", {"text": "u"}), gemini("model", {"text": "a"})]},
        chat(U, A),
    ),
    (
        "Vertex AI",
        {
            "system_instruction": {"parts": {"text": "s"}},
            "contents": [{"role": "user", "parts": {"text": "u"}}, gemini("model", {"text": "a"})],
        },
        chat(S, U, A),
    ),
    (
        "Anthropic",
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            **chat(
                U,
                {"role": "assistant", "content": [{"type": "text", "text": "so"}, USE]},
                {"role": "user", "content": [RESULT]},
                A,
            ),
            "tools": [{"name": "land", "description": "Lands.", "input_schema": PARAMETERS}],
        },
        chat(S, *called("tu", "so"), tools=TOOLS),
    ),
    (
        "Bedrock",
        {
            "schemaVersion": "bedrock-conversation-2024",
            "system": [{"text": "s"}],
            **chat(
                {"role": "user", "content": [{"text": "u"}]},
                {"role": "assistant", "content": [BEDROCK_USE]},
                {"role": "user", "content": [BEDROCK_RESULT]},
                {"role": "assistant", "content": [{"text": "a"}]},
            ),
            "toolConfig": {"tools": [BEDROCK_TOOL]},
        },
        chat(S, *called("tu"), tools=TOOLS),
    ),
    ("TRL", {"prompt": [S, U, A, U], "completion": [A]}, chat(S, U, A | {"weight": 0}, U, A)),
    (
        "TRL",
        chat(
            U,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": NAMED}]},
            {"role": "tool", "name": "land", "content": "ok"},
            A,
            tools=TOOLS,
        ),
        chat(*called(), tools=TOOLS),
    ),
    (
        "OpenAI's older functions",
        chat(
            U,
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "land", "content": "ok"},
            A,
            functions=[LAND],
        ),
        chat(*called(), tools=TOOLS),
    ),
    (
        "LLaMA-Factory",
        chat(
            {"role": "user", "content": [{"type": "text", "value": "u"}]},
            {"role": "assistant", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.0},
            U,
            A,
        ),
        chat(U, A | {"weight": 0}, U, A),
    ),
    ("LLaMA-Factory", chat(U, A, tools=json.dumps([LAND])), chat(U, A, tools=TOOLS)),
    (
        "other roles (tool_call)",
        chat(
            U,
            {"role": "tool_call", "content": json.dumps(NAMED)},
            {"role": "tool_response", "content": "ok"},
            A,
            tools=TOOLS,
        ),
        chat(*called(), tools=TOOLS),
    ),
    ("other roles (model)", chat(U, A | {"role": "model"}), chat(U, A)),
    (
        "other roles (System)",
        chat(S | {"role": "System"}, U, A | {"role": "Chatbot"}),
        chat(S, U, A),
    ),
    ("questions and answers", {"query": "u", "response": "a", "system": "s"}, chat(S, U, A)),
    ("questions and answers", {"question": "u", "answer": "a", "history": []}, chat(U, A)),
    ("questions and answers", {"prompt": "u", "response": "a"}, chat(U, A)),
    (
        "ChatML",
        {"text": "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"},
        chat(U, A),
    ),
    ("a JSON array", [chat(U, A), chat(U, A)], chat(U, A)),
    ("a list of messages", [S, U, A], chat(S, U, A)),
]


@pytest.mark.parametrize(("name", "row", "expected"), FORMATS)
def test_rows_of_public_formats_are_named_and_converted(
    name: str, row: Any, expected: dict[str, Any]
) -> None:
    line = json.dumps(row).encode()
    found = lint(line)
    assert [str(problem) for problem in found.problems] == [
        f"line 1 is a row of another format: {name}"
    ]
    assert "`lorikeet datasets convert FILE NEW_FILE` converts the file" in found.complaint
    made, conversion = converted(row)
    assert list(conversion.formats) == [name] and not conversion.problems
    assert all(read_row(each) == read_row(expected) for each in made) and made
    for key in keys.NEUTRAL & (row.keys() if isinstance(row, dict) else set()):
        assert made[0][key] == row[key]


KTO = "label is a key of preference tuning in a form that is not read"
NO_TEXT = "is not text, and the models read only text"
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
IMAGE = {"fileData": {"mimeType": "image/png", "fileUri": "gs://x"}}
LOSSES: list[tuple[Any, str]] = [
    ({"prompt": "u", "completion": "a", "label": True}, KTO),
    ({"prompt": [U], "chosen": [A]}, "chosen is a key of preference tuning"),
    (
        {"query": "u", "response": "a", "rejected_response": "b"},
        "rejected_response is a key of pre",
    ),
    ({"instruction": "u", "chosen": "a", "rejected": "b"}, "chosen is a key of preference"),
    ({"conversations": [human()], "chosen": gpt(), "rejected": gpt("b")}, "chosen is a key of pre"),
    ({"text": "plain"}, "text does not say which part is learned"),
    ({"text": "### Human: u ### Assistant: a"}, "text does not say which part is learned"),
    ({"text": "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nc"}, "text does not say"),
    ({"input_ids": [1], "labels": [1]}, "must be text"),
    ({"segments": [{"label": False, "text": "x"}]}, "must be text"),
    ({"conversations": [human("<image>"), gpt()], "image": "x.png"}, f"image {NO_TEXT}"),
    ({"conversations": [human(), gpt()], "mask": "User"}, "mask is not a known key"),
    (
        {"conversations": [human(), gpt(markdown="x")]},
        "conversations[1].markdown is not a known key",
    ),
    ({"conversations": [human(), {"from": "sage", "value": "a"}]}, "conversations[1].role is not"),
    (
        {"conversations": [human(), {"from": "function_call", "value": "f(1)"}]},
        "conversations[1] mu",
    ),
    (
        {"conversations": [human(), {"from": "observation", "value": "1"}]},
        "messages[1] is a tool's",
    ),
    ({"contents": [gemini("user", IMAGE)]}, f"contents[0].content[0] {NO_TEXT}"),
    (
        {
            "contents": [
                gemini("user", {"text": "u"}),
                gemini("model", {"text": "a", "thought": True}),
            ]
        },
        "contents[1].content[0].thought is not a known key",
    ),
    (
        {"contents": [gemini("user", {"text": "u"})], "generationConfig": {"n": 1}},
        "generationConfig",
    ),
    (
        chat(U, {"role": "assistant", "content": [THOUGHT, USE]}, tools=TOOLS),
        "messages[1].content[0] would not be learned: write it as `reasoning_content`",
    ),
    (
        chat(
            U, {"role": "assistant", "content": [USE, {"type": "text", "text": "a"}]}, tools=TOOLS
        ),
        "messages[1] must not have text after a call or before a tool's result",
    ),
    (
        chat(
            U,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT | {"is_error": True}]},
            A,
            tools=TOOLS,
        ),
        "messages[2].content[0].is_error is not a known key",
    ),
    (
        chat(U, {"role": "assistant", "content": [{"reasoningContent": {}}, {"text": "a"}]}),
        "messages[1].content[0] would not be learned",
    ),
    ({"prompt": [U]}, "completion is missing: it is the text to learn"),
    ({"prompt": [U], "completion": "a"}, "completion must be a list of messages"),
    ({"instruction": "u", "output": "a", "text": "other"}, "text differs from the instruction and"),
    ({"question": "u", "context": "c", "answer": "a"}, "context is not a known key"),
    ({"query": "u", "response": "a", "history": [["u"]]}, "history must be a list of pairs"),
    (chat(U, A | {"role": "model", "loss": False}, system_prompt=3), "system must be text"),
    (
        {"system": "s", "conversations": [{"from": "system", "value": "t"}, human(), gpt()]},
        "system is",
    ),
    ({"body": chat(U, A)}, "has neither `messages` nor `prompt`"),
    (3, "has neither `messages` nor `prompt`"),
]


@pytest.mark.parametrize(("row", "expected"), LOSSES)
def test_what_would_be_lost_is_refused_by_line_and_name(row: Any, expected: str) -> None:
    alpaca = {"instruction": "u", "output": "a"}
    made, conversion = converted(alpaca, row)
    assert made == [chat(U, A)]
    (problem,) = conversion.problems
    assert problem.removeprefix("line 2: ").removeprefix("line 2 ").startswith(expected)
    assert problem.startswith("line 2")
    # An upload says the same of the row, which no conversion makes good.
    found = lint(json.dumps(row).encode())
    (said,) = found.problems
    assert str(said).removeprefix("line 1: ").removeprefix("line 1 ").startswith(expected)
    assert "converts the file" not in found.complaint


def test_rows_of_ours_are_left_as_they_are() -> None:
    lines = b'{"messages": [],  "learn":1}\r\n\n{"prompt":"\\u00e9", "completion":"a"}'.split(b"\n")
    conversion = Conversion()
    made = list(conversion.lines(lines))
    assert made == [b'{"messages": [],  "learn":1}\n', b'{"prompt":"\\u00e9", "completion":"a"}\n']
    assert (conversion.num_rows, dict(conversion.formats), conversion.problems) == (2, {}, [])


@pytest.mark.parametrize(
    ("content", "num_rows", "problems"),
    [
        (b"\xef\xbb\xbf[\n%s,\n%s\n]\n", 2, []),
        (b"[%s]\n[%s]", 2, []),
        (b" [ ]\n", 0, []),
        (b"[%s,\n 5,\n%s]", 2, ["line 1, row 2 has neither"]),
        (b"[%s,\n%s", 2, ["line 1 is not JSON: an array does not end correctly"]),
        (b"[%s]\n%s x", 1, ["line 2 is not JSON"]),
        (b'[%s,\n{"a": NaN}]', 1, ["line 1 has NaN"]),
        (b'[%s,\n{"text": "\xff"}]', 0, ["line 1 is not JSON: it is not text"]),
        (b"%s\n" + b"[" * 9000, 1, ["line 2 is nested too deeply"]),
        (b'{"conversations": %s, "id": 1, "id": 2}', 0, ["line 1 has the key id twice"]),
    ],
)
def test_files_of_arrays_become_lines(content: bytes, num_rows: int, problems: list[str]) -> None:
    row = b'{"instruction": "u", "output": "a"}'
    conversion = Conversion()
    made = list(conversion.lines(content.replace(b"%s", row).split(b"\n")))
    assert made == [json.dumps(chat(U, A)).encode() + b"\n"] * num_rows
    assert len(conversion.problems) == len(problems)
    for problem, expected in zip(conversion.problems, problems, strict=True):
        assert problem.startswith(expected)


NAMES = [
    *("messages", "conversations", "contents", "prompt", "completion", "instruction", "output"),
    *("input", "query", "response", "history", "text", "system", "tools", "functions", "label"),
    *("role", "from", "content", "value", "parts", "tool_calls", "function_call", "tool_call_id"),
    *("id", "type", "function", "name", "arguments", "input_schema", "toolUse", "toolResult"),
    *("functionCall", "functionResponse", "functionDeclarations", "json", "weight", "loss"),
]
WORDS = [
    *("user", "assistant", "system", "tool", "human", "gpt", "model", "function_call", "text"),
    *("tool_use", "tool_result", "function", "{}", '{"name": "f"}', "[", "u", "", " ", "\ud83e"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.just(0.5) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=16,
)


@settings(max_examples=200, deadline=None)
@given(row=VALUES)
def test_any_row_is_read_converted_or_refused(row: Any) -> None:
    line = json.dumps(row).encode()
    lint(line)
    made, conversion = converted(row)
    assert made or conversion.problems or isinstance(row, list)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each place in a value: what it is in, and under which key."""
    names: Any = range(len(value)) if isinstance(value, list) else value
    found = []
    for name in names if isinstance(value, list | dict) else ():
        found += [(value, name), *places(value[name])]
    return found


SPOILS: list[Any] = [None, 1, "", "x", [1], {"a": 1}, [{"role": "tool"}], {"type": "text"}]


@pytest.mark.parametrize("row", [row for _, row, _ in FORMATS])
def test_a_spoiled_row_is_read_converted_or_refused(row: Any) -> None:
    text = json.dumps(row)
    for number in range(len(places(row))):
        for spoil in SPOILS:
            spoiled = json.loads(text)
            where, name = places(spoiled)[number]
            where[name] = spoil
            lint(json.dumps(spoiled).encode())
            converted(spoiled)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "<|im_start|>user\n" * 60_000},
        {"conversations": [{"from": "function_call", "value": '{"name": "f"}'}] * 20_000},
        {
            "messages": [
                {"role": "assistant", "content": [{"toolUse": {"name": "f"}}] * 20_000},
                *[{"role": "tool", "content": ""}] * 12_000,
            ]
        },
        {"messages": [{"role": "user", "content": [{"toolResult": {"x": 1}}] * 20_000}] * 2},
        {"conversations": [human()] * 20_000},
        {"messages": [U, A], "tools": "[" * 300_000},
    ],
)
def test_a_long_row_takes_little_time(row: Any) -> None:
    begun = time.process_time()
    line = json.dumps(row).encode()
    assert lint(line).problems and converted(row)[1].problems
    # A slow machine takes 1.2 s for the longest; what is quadratic in 20,000 parts takes minutes.
    assert time.process_time() - begun < 5
