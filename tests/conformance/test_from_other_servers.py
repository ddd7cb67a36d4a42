"""Requests as clients of vLLM, SGLang, TGI and LoRAX send them, and as litellm and Hugging Face's
client send a conversation back. Bodies of our own writing, in the shapes that those have."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conformance.conftest import Served, say
from tests.fakes import FAKE_CONTEXT, FAKE_NAME
from tests.tiny_base import ROOMY_CONTEXT, ROOMY_NAME

CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
#: `message.model_dump()` of a litellm answer, put into the next request.
LITELLM = [
    {
        "role": "system",
        "content": [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "user", "content": "Rain in Oslo?", "cache_control": {"type": "ephemeral"}},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "index": 0,
                "id": "call_1",
                "type": "function",
                "function": {**CALL, "provider_specific_fields": None},
                "provider_specific_fields": {"thought_signature": "abc"},
            }
        ],
        "function_call": None,
        "audio": None,
        "refusal": None,
        "annotations": [],
        "images": None,
        "reasoning_content": "The user asks of rain.",
        "thinking_blocks": [{"type": "thinking", "thinking": "of rain", "signature": "x"}],
        "provider_specific_fields": {"refusal": None, "nested": {"deep": [1, 2, {"x": None}]}},
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "wet"},
    {"role": "user", "content": "And now?"},
]
#: `asdict` of huggingface_hub's ChatCompletionOutputMessage.
HUGGING_FACE = [
    {"role": "user", "content": [{"type": "text", "text": "Rain in Oslo?"}], "tool_calls": None},
    {
        "role": "assistant",
        "content": "It rains.",
        "reasoning": "Clouds.",
        "tool_call_id": None,
        "tool_calls": [],
    },
    {
        "role": "assistant",
        "content": None,
        "reasoning": None,
        "tool_call_id": None,
        "tool_calls": [
            {"function": {**CALL, "description": None}, "id": "call_2", "type": "function"}
        ],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "wet", "tool_calls": None},
    {"role": "user", "content": "And now?"},
]


def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {served.key()}", **headers}
    return httpx.post(served.url + path, json=body, headers=headers, timeout=60)


def chat(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": FAKE_NAME, "messages": say("hello"), **fields}
    return post(served, "/v1/chat/completions", body)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("messages", [LITELLM, HUGGING_FACE], ids=["litellm", "huggingface"])
def test_a_conversation_is_sent_back_as_it_came(served: Served, messages: list[Any]) -> None:
    for model in (FAKE_NAME, ROOMY_NAME):
        answer = chat(served, model=model, messages=messages, max_tokens=20)
        assert answer.status_code == 200, answer.text
    assert chat(served, messages=messages).json()["choices"][0]["message"]["content"] == "And now?"


def test_what_is_ignored_is_not_in_the_prompt(served: Served) -> None:
    plain = [*say("one"), {"role": "assistant", "content": "two"}, *say("three")]
    extra = [{**message, "reasoning": "x" * 300, "unknown": {"a": 1}} for message in plain]
    asked = [chat(served, model=ROOMY_NAME, messages=m, max_tokens=1) for m in (plain, extra)]
    assert len({answer.json()["usage"]["prompt_tokens"] for answer in asked}) == 1


def test_only_the_bodys_length_bounds_what_is_ignored(served: Served) -> None:
    many = {f"k{i}": [None] * 10 for i in range(20_000)}
    assert chat(served, messages=[{**say("x")[0], **many}]).status_code == 200
    answer = chat(served, messages=[{**say("x")[0], "reasoning": "x" * (8 << 20)}])
    assert error_of(answer, 413)["code"] == "payload_too_large"


def test_a_typing_error_beside_the_messages_is_still_found(served: Served) -> None:
    error = error_of(chat(served, temprature=0.5))
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "No. " * 200},
        {"content": [{"type": "refusal", "refusal": "No. " * 200}]},
    ],
)
def test_a_refusal_that_is_sent_back_is_its_messages_text(
    served: Served, said: dict[str, Any]
) -> None:
    refused = {"role": "assistant", **said}
    messages = [*say("x"), refused, *say("y")]
    answer = chat(served, model=ROOMY_NAME, messages=messages, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 600


WEATHER = {"type": "function", "function": {"name": "weather"}}
NAMED = {"type": "function", "name": "weather"}
NO = [{"type": "refusal", "refusal": "No, never."}]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"moderation": None, "web_search_options": None, "prediction": None},
        {"tools": [WEATHER], "tool_choice": "weather"},
    ],
)
def test_a_chat_of_todays_clients_is_answered(served: Served, fields: dict[str, Any]) -> None:
    answer = chat(served, **fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"mode": "explicit"}, "moderation": None, "max_tool_calls": 3},
        {"reasoning": {"effort": "low", "mode": "standard", "context": "auto"}},
        {
            "tools": [{**NAMED, "output_schema": None, "allowed_callers": None}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
        },
        {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"]},
        {"input": [*say("a"), {"type": "message", "role": "assistant", "content": NO}, *say("b")]},
    ],
)
def test_a_response_of_todays_clients_is_made(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": FAKE_NAME, "input": "hi", "max_output_tokens": 30, **fields}
    answer = post(served, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    if "tool_choice" in fields:
        assert answer.json()["tool_choice"] == fields["tool_choice"]


def test_reasoning_among_a_responses_items_is_passed_over(served: Served) -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "two", "annotations": [], "extra": 1}],
            "provider_data": {},
        },
        {"role": "user", "content": "three"},
    ]
    answer = post(served, "/v1/responses", {"model": FAKE_NAME, "input": items})
    assert answer.json()["output"][0]["content"][0]["text"] == "three"
    alone = post(served, "/v1/responses", {"model": FAKE_NAME, "input": [items[1]]})
    assert "items of type message" in error_of(alone)["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_usage_goes_on_in_every_chunk(served: Served, path: str) -> None:
    """As guidellm and vLLM's own benchmark ask for it."""
    body = {
        "model": FAKE_NAME,
        "messages": say("one two three"),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if path == "completions":
        body |= {"prompt": [body.pop("messages")[0]["content"], "four five"], "max_tokens": 99}
    *chunks, last = events(post(served, f"/v1/{path}", body))
    assert last["choices"] == []
    totals: dict[int, int] = {}
    for chunk in chunks:
        usage, [choice] = chunk["usage"], chunk["choices"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] >= totals.get(choice["index"], 0)
        assert usage["prompt_tokens"] > 0
        totals[choice["index"]] = usage["completion_tokens"]
    assert chunks[0]["usage"]["completion_tokens"] < totals[0]
    assert sum(totals.values()) == last["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({"continuous_usage_stats": True}, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"include_usage": False, "continuous_usage_stats": False}, False),
    ],
    ids=str,
)
def test_usage_in_every_chunk_needs_usage(
    served: Served, options: dict[str, bool], has_usage: bool
) -> None:
    chunks = events(chat(served, stream=True, stream_options=options))
    assert any(chunk.get("usage") for chunk in chunks) == has_usage


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_is_off(served: Served, top_k: int) -> None:
    drawn = {"model": ROOMY_NAME, "max_tokens": 12, "seed": 3}
    [answer, same] = [chat(served, **drawn, **{"top_k": top_k}), chat(served, **drawn)]
    assert answer.json()["choices"] == same.json()["choices"]
    assert error_of(chat(served, top_k=-2))["param"] == "top_k"


def test_a_response_is_as_long_as_it_was_asked_for(served: Served) -> None:
    body = {"model": ROOMY_NAME, "input": "x", "ignore_eos": True, "max_output_tokens": 40}
    answer = post(served, "/v1/responses", {**body, "top_k": -1})
    assert answer.json()["usage"]["output_tokens"] == 40


SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "<" word ("," root)? ">"\nword ::= [ab]{1,3}'
LARK = 'start: "yes" | "no" MARK?\nMARK: /[!?]/'


def is_of_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize(
    ("fields", "obeys"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_of_schema),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, is_of_schema),
        ({"response_format": {"type": "json", "value": SCHEMA}}, is_of_schema),
        ({"response_format": {"type": "regex", "value": "[xy]{3}"}}, {*"xy"}.issuperset),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, is_of_schema),
        ({"guided_json": json.dumps(SCHEMA)}, is_of_schema),
        ({"guided_regex": "[xy]{3}"}, {*"xy"}.issuperset),
        ({"guided_choice": ["one", "two"]}, {"one", "two"}.__contains__),
        ({"guided_grammar": GRAMMAR}, lambda text: text[0] + text[-1] == "<>"),
        ({"structured_outputs": {"json": SCHEMA}}, is_of_schema),
        ({"structured_outputs": {"regex": "[xy]{3}"}}, {*"xy"}.issuperset),
        ({"structured_outputs": {"choice": ["one", "two"]}}, {"one", "two"}.__contains__),
        ({"structured_outputs": {"grammar": LARK}}, {"yes", "no", "no!", "no?"}.__contains__),
        ({"structured_outputs": {"json_object": True}}, lambda text: text.startswith("{")),
        ({"regex": "[xy]{3}"}, {*"xy"}.issuperset),
        ({"ebnf": GRAMMAR}, lambda text: text[0] + text[-1] == "<>"),
        ({"json_schema": json.dumps(SCHEMA)}, is_of_schema),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_answer_is_held_to_what_other_servers_call_it(
    served: Served, fields: dict[str, Any], obeys: Any
) -> None:
    is_open = "json_object" in str(fields) and "unit" not in str(fields)
    body = {"model": ROOMY_NAME, "max_tokens": 40 if is_open else 600, "seed": 1, **fields}
    answer = chat(served, **body).json()
    assert obeys(answer["choices"][0]["message"]["content"]), answer
    answer = post(served, "/v1/completions", {"prompt": "x", **body}).json()
    assert obeys(answer["choices"][0]["text"]), answer


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_json": {"type": 3}}, "guided_json", "type"),
        ({"guided_json": "{"}, "guided_json", "not of valid JSON"),
        ({"guided_json": '{"const": 1e999}'}, "guided_json", "not of valid JSON"),
        ({"guided_regex": "(a"}, "guided_regex", "not a regular expression"),
        ({"guided_grammar": "start: a"}, "guided_grammar", "cannot be used"),
        ({"ebnf": 'root ::= "a'}, "ebnf", "line 1"),
        ({"ebnf": "root ::= root"}, "ebnf", "cannot be used"),
        ({"structured_outputs": {}}, "structured_outputs", "json, regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "Unrecognized"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        ({"regex": "a", "guided_choice": ["b"]}, "regex", "cannot be combined with guided_choice"),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "regex",
            "cannot be combined with response_format",
        ),
        ({"regex": "a", "tools": [TOOL]}, "regex", "cannot be combined with tools"),
        ({"response_format": {"type": "text", "value": {}}}, "response_format.value", "a schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "allowed"),
    ],
    ids=str,
)
def test_what_cannot_be_held_to_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(chat(served, model=ROOMY_NAME, **fields))
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_token_ids_are_those_of_the_prompt_and_the_answer(served: Served, stream: bool) -> None:
    options: dict[str, Any] = {"model": ROOMY_NAME, "temperature": 0, "max_tokens": 12}
    options |= {"return_token_ids": True, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}

    def asked(path: str, **fields: Any) -> tuple[list[int], list[list[int]], dict[str, Any]]:
        answer = post(served, f"/v1/{path}", {**options, **fields})
        bodies = events(answer) if stream else [answer.json()]
        prompt: list[int] = []
        of_choice: dict[int, list[int]] = {}
        for body in bodies:
            prompt += body.get("prompt_token_ids") or []
            for choice in body["choices"]:
                if choice["index"] == 0:
                    prompt += choice.get("prompt_token_ids") or []
                of_choice.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
        return prompt, list(of_choice.values()), bodies[-1]["usage"]

    prompt, [answer], usage = asked("chat/completions", messages=say("hello you"))
    assert (len(prompt), len(answer)) == (usage["prompt_tokens"], usage["completion_tokens"])
    again, choices, _ = asked("completions", prompt=prompt, n=2)
    assert again == prompt
    assert choices == [answer, answer]
    assert "token_ids" not in chat(served).text


def test_the_base_stands_first_and_says_how_long_its_context_is(served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.key()}"}
    data = httpx.get(f"{served.base_url}/models", headers=headers).json()["data"]
    kinds = [model["parent"] is None for model in data]
    assert kinds == sorted(kinds, reverse=True)
    contexts = {model["id"]: model["max_model_len"] for model in data}
    assert (contexts[FAKE_NAME], contexts[ROOMY_NAME]) == (FAKE_CONTEXT, ROOMY_CONTEXT)
    roots = {model["id"]: (model["root"], model["parent"]) for model in data}
    assert roots[FAKE_NAME] == (FAKE_NAME, None)
    assert roots["acme-adapter"] == (FAKE_NAME, FAKE_NAME)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "x", "suffix": ""}),
        ("chat/completions", {"messages": say("x"), "tool_choice": "auto"}),
        ("responses", {"input": "x", "tool_choice": "auto", "truncation": "auto"}),
    ],
    ids=str,
)
def test_what_says_nothing_is_taken(served: Served, path: str, fields: dict[str, Any]) -> None:
    answer = post(served, f"/v1/{path}", {"model": FAKE_NAME, **fields})
    assert answer.status_code == 200, answer.text


def test_truncation_drops_the_oldest_turns(served: Served) -> None:
    turns = [{"role": "user", "content": f"{i} " + "many words " * 60} for i in range(30)]
    body = {"model": ROOMY_NAME, "instructions": "Be brief.", "input": turns}
    body |= {"max_output_tokens": 30, "ignore_eos": True, "truncation": "auto"}
    answer = post(served, "/v1/responses", body).json()
    assert (answer["truncation"], answer["usage"]["output_tokens"]) == ("auto", 30)
    kept = answer["usage"]["input_tokens"]
    one = post(served, "/v1/responses", {**body, "input": turns[-1:]}).json()["usage"]
    assert ROOMY_CONTEXT - 30 - one["input_tokens"] < kept <= ROOMY_CONTEXT - 30
    refused = error_of(post(served, "/v1/responses", {**body, "truncation": "disabled"}))
    assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
    long = [{"role": "user", "content": "many words " * 2000}]
    assert error_of(post(served, "/v1/responses", {**body, "input": long}))["param"] == "input"


def test_an_empty_model_asks_which_base_where_there_are_several(served: Served) -> None:
    message = error_of(chat(served, model=""))["message"]
    assert FAKE_NAME in message and ROOMY_NAME in message and "as the model" in message
    answer = httpx.post(f"{served.base_url}/chat/completions", json={"model": "", "messages": []})
    assert "provided" in error_of(answer, 401)["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content.0",
            "`image_url`: the models here read text alone",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "`input_image`: the models here read text alone",
        ),
        ("completions", {"prompt": [-1]}, "prompt.0", "it must be 0 or more"),
        ("completions", {"prompt": {}}, "prompt", "it must be a string or a list"),
        ("responses", {"input": []}, "input", "it must have 1 entries or more"),
        ("chat/completions", {"messages": say("x"), "n": 0}, "n", "it must be 1 or more"),
        (
            "chat/completions",
            {"messages": [{"role": "king", "content": "x"}]},
            "messages.0.role",
            "it must be 'developer', 'system'",
        ),
        (
            "chat/completions",
            {"model": "acme-adaptor", "messages": say("x")},
            "model",
            "Did you mean `acme-adapter`? GET /v1/models lists",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_way_out(
    served: Served, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    answer = post(served, f"/v1/{path}", {"model": FAKE_NAME, **fields})
    error = error_of(answer, 404 if "Did you" in says else 400)
    assert error["param"] == param
    assert says in error["message"]
    assert "Input should" not in error["message"]


def test_no_name_of_another_tenant_is_suggested(served: Served) -> None:
    message = error_of(chat(served, model="globex-adapte"), 404)["message"]
    assert "globex-adapter" not in message


def test_what_stands_in_place_of_a_responses_id_is_answered_for_itself(served: Served) -> None:
    error = error_of(post(served, "/v1/responses/input_tokens", {"input": "x"}), 404)
    assert "usage.input_tokens" in error["message"]


def test_a_key_without_its_word_is_told_of_it(served: Served) -> None:
    for sent in (served.key(), f"Basic {served.key()}"):
        error = error_of(post(served, "/v1/chat/completions", {}, Authorization=sent), 401)
        assert "Authorization: Bearer <key>" in error["message"]
        assert served.key() not in error["message"]
