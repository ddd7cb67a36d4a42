"""Calls in the forms of other models become calls in ours, whatever pieces they come in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.messages.tool_calls import read_calls
from engine.text.call_formats import FORMATS, CallTranslator, call_format

FIRST, SECOND = '{"a": "} \\"x\\" ["}', '{"b": {"c": [1, {}]}}'
WRITTEN = {
    "llama": f'{{"name": "f", "parameters": {FIRST}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {FIRST}}}, '
    f'{{"name": "g_2", "arguments": {SECOND}}}]',
    "mistral_3": f'[TOOL_CALLS] [{{"name": "f", "arguments": {FIRST}}}]',
    "mistral_args": f"[TOOL_CALLS]f[ARGS]{FIRST}[TOOL_CALLS]g_2[ARGS]{SECOND}",
    "glm4": f"f\n{FIRST}",
    "granite": f'<|tool_call|>[{{"name": "f", "arguments": {FIRST}}}, '
    f'{{"name": "g_2", "arguments": {SECOND}}}]',
}


BARE = '{a:<|"|>} "x" [<|"|>,b:{c_d:[1,-2.5,<|"|>é\\n<|"|>],e:true,f:{}}}'
WRITTEN["gemma4"] = f"<|tool_call>call:f{BARE}<tool_call|><|tool_call>call:g_2{{}}<tool_call|>"


WRITTEN["qwen3_5"] = (
    '<tool_call>\n<function=f>\n<parameter=a>\n} "x" <\n</parameter\n</parameter>\n<parameter=n>\n'
    "[1]\n</parameter>\n<parameter=t>\nHm.\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g_2>\n</function>\n</tool_call>"
)
TYPES = {"properties": {"a": {"type": "string"}, "n": {"type": "array"}, "t": {}}}


def translated(name: str, text: str, size: int) -> str:
    translator = CallTranslator(FORMATS[name], {"g": {}, "f": TYPES, "g_2": {}})
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return "".join(map(translator.feed, pieces)) + translator.finish()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls(name: str, size: int) -> None:
    calls = [("f", FIRST), ("g_2", SECOND)][: 2 if "g_2" in WRITTEN[name] else 1]
    if name in ("gemma4", "qwen3_5"):
        arguments: dict[str, Any] = {"a": '} "x" <\n</parameter', "n": [1], "t": "Hm."}
    if name == "gemma4":
        arguments = {"a": '} "x" [', "b": {"c_d": [1, -2.5, "é\\n"], "e": True, "f": {}}}
    if name in ("gemma4", "qwen3_5"):
        found = read_calls(translated(name, WRITTEN[name], size))
        assert [(called, json.loads(text)) for called, text in found] == [
            ("f", arguments),
            ("g_2", {}),
        ]
        return
    for blanks in ("", "\n "):
        assert read_calls(translated(name, blanks + WRITTEN[name], size)) == calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "It is."),
        ("llama", '{"name": "f", "n": 1}'),
        ("llama", '\n{"name": "fa'),
        ("mistral", "[TOOL_CALL] is"),
        ("glm4", "\nf is a function"),
        ("glm4", "g"),
    ],
)
def test_other_text(name: str, text: str, size: int) -> None:
    assert translated(name, text, size) == text


def test_a_call_that_is_cut_off_has_no_end() -> None:
    assert translated("glm4", 'f\n{"a": "', 2) == '<tool_call>\n{"name": "f", "arguments": {"a": "'


@pytest.mark.parametrize(
    ("family", "template", "name"),
    [
        ("llama", '{"name": "x", "parameters": {}}', "llama"),
        ("llama", "<tool_call>", None),
        ("mistral", "[TOOL_CALLS] [", "mistral_3"),
        ("mistral", "[TOOL_CALLS][", "mistral"),
        ("ministral3", "[TOOL_CALLS]f[ARGS]", "mistral_args"),
        ("glm4", "<|observation|>", "glm4"),
        ("granite", "<|tool_call|>", "granite"),
        ("qwen2", '"parameters": ', None),
        (None, "[TOOL_CALLS]", None),
    ],
)
def test_the_family_and_its_template_say_which_form(
    family: str | None, template: str, name: str | None
) -> None:
    config = json.loads(json.dumps({"model_type": family}))
    assert call_format(config, template) == (None if name is None else FORMATS[name])
