"""Behind a thought, an answer is bound by its schema and the calls of its tools."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from engine.text.codec import TextCodec
from tests.chat_templates import write_tokenizer
from tests.engine.text.vocabularies import byte_level
from tests.messages import make_job
from worker.serving.engine_commands import read_prompts, to_requests

SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}},
                     "required": ["n"], "additionalProperties": False})  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": json.loads(SCHEMA)}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    return made


@pytest.fixture(scope="module")
def codec(tokenizer: Tokenizer) -> TextCodec:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    codec = TextCodec.of(Tokenizer.from_str(tokenizer.to_str()), template, {"eos_token": "</s>"})
    codec.context_length = 1000
    return codec


def is_allowed(codec: TextCodec, tokenizer: Tokenizer, answer: str, **fields: Any) -> bool:
    """Whether the request's grammar allows the whole answer."""
    prompt, end = fields.pop("prompt", "Why?"), fields.pop("end", "</s>")
    job = make_job(text=None, messages=({"role": "user", "content": prompt},), **fields)
    [request] = to_requests(job, 1, read_prompts(job, codec), codec)
    if request.json_schema is not None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(request.json_schema)
    else:
        assert request.lark is not None
        grammar = llguidance.LLMatcher.grammar_from_lark(request.lark)
    known = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(end))
    matcher = llguidance.LLMatcher(known, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


CALLING: dict[str, Any] = {"tools": (TOOL,), "tool_schemas": (SCHEMA,)}


@pytest.mark.parametrize(
    ("answer", "allowed", "fields"),
    [
        ('{"n": 1}', True, {"json_schema": SCHEMA}),
        ('<think>\nIs {"n" 1? a/b "é"\n</think>\n\n{"n": 1}', True, {"json_schema": SCHEMA}),
        ("<think>Hm</think>One.", False, {"json_schema": SCHEMA}),
        ("<think>Hm", False, {"json_schema": SCHEMA}),
        ('Hm</think>{"n": 1}', True, {"json_schema": SCHEMA, "prompt": "Why?<think>\n"}),
        ('{"n": 1}', False, {"json_schema": SCHEMA, "prompt": "Why?<think>\n"}),
        ('<think>Hm</think>{"n": 1}', False, {"json_schema": SCHEMA, "prompt": "<think></think>"}),
        (f"<think>Hm</think>\n\n{CALL}", True, CALLING),
        (CALL, True, CALLING),
        ("<think>Hm</think>\n\nIt is so.", True, CALLING),
        ("It is so.", True, CALLING),
        (f"<think>Hm</think>{CALL}".replace("1", '"1"'), False, CALLING),
        ("<think>Hm</think>It is so.", False, {**CALLING, "tool_choice": "required"}),
        (f"<think>Hm</think>{CALL}", True, {**CALLING, "tool_choice": "required"}),
        (f"<think>Hm</think>{CALL}", True, {**CALLING, "json_schema": SCHEMA}),
        ("<think>Hm</think>It is so.", False, {**CALLING, "json_schema": SCHEMA}),
    ],
)  # fmt: skip
def test_what_may_follow_a_thought(
    codec: TextCodec, tokenizer: Tokenizer, answer: str, allowed: bool, fields: dict[str, Any]
) -> None:
    assert is_allowed(codec, tokenizer, answer, **fields) is allowed


THOUGHT = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextCodec, Tokenizer]:
    folder = write_tokenizer(tmp_path_factory.mktemp("base"), "harmony")
    return TextCodec(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("answer", "allowed", "fields"),
    [
        (f'{THOUGHT}{FINAL}{{"n": 1}}', True, {"json_schema": SCHEMA}),
        (f'{FINAL}{{"n": 1}}', True, {"json_schema": SCHEMA}),
        ('{"n": 1}', False, {"json_schema": SCHEMA}),
        (f"{THOUGHT}{FINAL}One.", False, {"json_schema": SCHEMA}),
        (f'{THOUGHT}{TO}{{"n": 1}}', True, CALLING),
        (f'{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{"n": 1}}', True, CALLING),
        (f'{THOUGHT}{TO}{{"n": "1"}}', False, CALLING),
        (f'{TO.replace(".f", ".g")}{{"n": 1}}', False, CALLING),
        (f"{THOUGHT}{FINAL}It is so.", True, CALLING),
        (f"{THOUGHT}{FINAL}It is so.", False, {**CALLING, "tool_choice": "required"}),
        (f'{TO}{{"n": 1}}', True, {**CALLING, "tool_choice": "required"}),
        (f"{FINAL}It is so.", False, {**CALLING, "json_schema": SCHEMA}),
    ],
)
def test_what_may_stand_in_the_channels_of_gpt_oss(
    harmony: tuple[TextCodec, Tokenizer], answer: str, allowed: bool, fields: dict[str, Any]
) -> None:
    codec, tokenizer = harmony
    assert is_allowed(codec, tokenizer, answer, end="<|return|>", **fields) is allowed
