"""A model whose template writes calls in a form of its own is bound to it, and answers in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.messages.protocol import FinishReason
from contract.messages.tool_calls import read_calls
from engine.request import RequestOutput
from engine.text.codec import TextCodec
from tests.chat_templates import write_tokenizer
from tests.messages import make_job
from tests.worker.grammar.test_thoughts import SCHEMA, TOOL, is_allowed
from worker.serving.choice import Choice

CALL = '{"n": 1}'
FORMS = {
    "llama": ("llama3", "", f'{{"name": "f", "parameters": {CALL}}}', 1),
    "mistral": ("mistral", "", f'[TOOL_CALLS] [{{"name": "f", "arguments": {CALL}}}, '
                f'{{"name": "f", "arguments": {CALL}}}]', 2),
    "ministral3": ("mistral", "{{ tools }}[TOOL_CALLS]f[ARGS]{}",
                   f"[TOOL_CALLS]f[ARGS]{CALL}[TOOL_CALLS]f[ARGS]{CALL}", 2),
    "gemma4_text": ("chatml", "{{ tools }}<|tool_call>", "<|tool_call>call:f{n:1}<tool_call|>"
                    "<|tool_call>call:f{n:1}<tool_call|>", 2),
    "qwen3_5_text": ("chatml", "{{ tools }}<function=",
                     "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n"
                     "</tool_call>", 1),
    "glm4": ("chatml", "{{ tools }}<|observation|>", f"f\n{CALL}", 1),
}  # fmt: skip
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
BOUND: dict[str, Any] = {"tools": (TOOL,), "tool_schemas": (SCHEMA,)}


@pytest.fixture(scope="module", params=FORMS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    template, source, text, number = FORMS[request.param]
    folder: Path = tmp_path_factory.mktemp("base")
    special = GEMMA if request.param == "gemma4_text" else ()
    write_tokenizer(folder, template, model_type=request.param, source=source, special=special)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return TextCodec(folder), tokenizer, settings["eos_token"], text, number


def test_the_grammar_takes_the_models_own_form(family: Any) -> None:
    codec, tokenizer, end, text, number = family

    def takes(answer: str, **fields: Any) -> bool:
        return is_allowed(codec, tokenizer, answer, end=end, **{**BOUND, **fields})

    assert takes(text)
    assert takes(text, tool_choice="required")
    assert takes("It is so.")
    assert not takes("It is so.", tool_choice="required")
    assert not takes(text.replace("1", '"1"'))
    assert takes(text, parallel_tool_calls=False) is (number == 1)
    assert takes('{"n": 2}', json_schema=SCHEMA)
    assert not takes("It is so.", json_schema=SCHEMA)


def test_the_answer_has_calls_in_our_form(family: Any) -> None:
    codec, tokenizer, _, text, number = family
    messages = ({"role": "user", "content": "Why?"},)
    job = make_job(text=None, messages=messages, **BOUND)
    for answer, calls in ((text, [("f", CALL)] * number), ("It is so.", [])):
        choice = Choice(job, codec, 0)
        choice.begin([1])
        for token_id in tokenizer.encode(answer, add_special_tokens=False).ids:
            choice.feed(RequestOutput(request_id="r", token_ids=[token_id]))
        choice.feed(RequestOutput(request_id="r", token_ids=[], finish_reason=FinishReason.STOP))
        found = [(name, json.loads(each)) for name, each in read_calls(choice.answer)]
        assert found == [(name, json.loads(each)) for name, each in calls]
        assert calls or choice.answer == answer


ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "unit": {"enum": ["C", "F", 3]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "flag": {"anyOf": [{"type": "boolean"}, {"const": "no"}]},
        "any": {},
        "map": {"type": "object"},
    },
    "required": ["city", "place"],
}
TEXT = '<|"|>Paris} "x"<|"|>'


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextCodec, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("base")
    source = "{{ tools }}<|tool_call>"
    write_tokenizer(folder, "chatml", model_type="gemma4_text", source=source, special=GEMMA)
    return TextCodec(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


VALUE = "Paris } </parameter>\n"


def tagged(**values: str) -> str:
    between = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=f>\n{between}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"city": VALUE, "place": '{"x": 1.5}'}, True),
        ({"city": VALUE, "days": "null", "unit": '"C"', "place": '{"x": 1}', "any": "[2]"}, True),
        ({"city": VALUE}, False),
        ({"place": '{"x": 1}', "city": VALUE}, False),
        ({"city": VALUE, "days": "1.5", "place": '{"x": 1}'}, False),
        ({"city": VALUE, "place": "{}"}, False),
        ({"city": VALUE, "place": '{"x": 1}', "other": "1"}, False),
    ],
)
def test_a_schema_binds_arguments_between_tags(
    tmp_path: Path, values: dict[str, str], allowed: bool
) -> None:
    write_tokenizer(tmp_path, "chatml", model_type="qwen3_5_text", source="{{ tools }}<function=")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fields: dict[str, Any] = {"tools": (TOOL,), "tool_schemas": (json.dumps(ARGUMENTS),)}
    answer, codec = tagged(**values), TextCodec(tmp_path)
    assert is_allowed(codec, tokenizer, answer, end="<|im_end|>", **fields) is allowed


def test_a_thought_of_gemma_4_may_stand_before_a_call(gemma: tuple[TextCodec, Tokenizer]) -> None:
    call = "<|tool_call>call:f{n:1}<tool_call|>"
    for answer, allowed in (
        (f"<|channel>thought\nHm.<channel|>{call}", True),
        (f"<|channel>thought\nHm.<channel|>{call}".replace("n:1", "m:1"), False),
        (f"<|channel>final\nHm.<channel|>{call}", False),
        ("<|channel>thought\nHm.<channel|>It is.", True),
    ):
        assert is_allowed(*gemma, answer, end="<|im_end|>", **BOUND) is allowed


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (f"{{city:{TEXT},place:{{x:-1.5e3}}}}", True),
        (f"{{city:{TEXT},days:3,place:{{x:1}}}}", True),
        (f'{{city:{TEXT},days:null,unit:<|"|>C<|"|>,place:{{x:1}},flag:true}}', True),
        (f'{{city:{TEXT},unit:3,tags:[{TEXT},{TEXT}],place:{{x:1}},flag:<|"|>no<|"|>}}', True),
        (f"{{city:{TEXT},tags:[],place:{{x:1}},any:[1,{{a:{TEXT}}}],map:{{b:false}}}}", True),
        (f"{{city:{TEXT}}}", False),
        (f"{{place:{{x:1}},city:{TEXT}}}", False),
        (f"{{city:{TEXT},days:1.5,place:{{x:1}}}}", False),
        (f'{{city:{TEXT},unit:<|"|>K<|"|>,place:{{x:1}}}}', False),
        (f"{{city:{TEXT},place:{{}}}}", False),
        (f"{{city:{TEXT},place:{{x:1}},other:1}}", False),
        ("{city:Paris,place:{x:1}}", False),
    ],
)
def test_a_schema_binds_arguments_with_bare_keys(
    gemma: tuple[TextCodec, Tokenizer], arguments: str, allowed: bool
) -> None:
    answer = f"<|tool_call>call:f{arguments}<tool_call|>"
    fields: dict[str, Any] = {"tools": (TOOL,), "tool_schemas": (json.dumps(ARGUMENTS),)}
    assert is_allowed(*gemma, answer, end="<|im_end|>", **fields) is allowed
