"""What is said about a value that is wrong: all that may stand there, in our own words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.errors import InvalidRequest
from controlplane.gateway.batches.bodies import BatchBody
from controlplane.gateway.feedback import FeedbackBody
from controlplane.gateway.files.bodies import UploadBody
from controlplane.gateway.fine_tuning.bodies import FineTuningJobBody
from controlplane.gateway.lorax.schemas import GenerateBody
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.responses.translation import chat_body
from controlplane.inference.schemas import ChatBody, CompletionBody

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
#: One body of each kind, with fields of all types.
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (
        ChatBody,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "c"},
            ],
            "temperature": 1,
            "stop": ["a"],
            "logit_bias": {"5": 1},
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": FORMAT,
            "chat_template_kwargs": {"a": 1},
            "prompt_cache_options": {"mode": "implicit"},
            "adapters": [{"name": "a", "weight": 1}],
        },
    ),
    (CompletionBody, {"model": "m", "prompt": [[1, 2], [3]], "best_of": 1}),
    (
        ResponsesBody,
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", "name": "f", "allowed_callers": ["direct"]}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
            "include": ["message.output_text.logprobs"],
            "text": {"format": {"type": "text"}},
        },
    ),
    (
        GenerateBody,
        {"inputs": "x", "parameters": {"stop": ["a"], "grammar": {"type": "regex", "value": "a"}}},
    ),
    (
        FineTuningJobBody,
        {
            "model": "m",
            "training_file": "f",
            "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}},
        },
    ),
    (BatchBody, {"input_file_id": "f", "endpoint": "/v1/responses", "completion_window": "24h"}),
    (UploadBody, {"filename": "f", "purpose": "batch", "bytes": 1, "mime_type": "text/plain"}),
    (FeedbackBody, {"request_id": "r", "corrected_answer": {"content": "x"}}),
]
WRONG: list[Any] = [None, True, -1, 1.5, "3", "x", "", [], {}, [5], {"x": 1}, 10**30]


def fault(kind: Any, body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("3", "it must be a number without quotes or 'auto'."),
        ("many", "it must be a number or 'auto'."),
        (True, "it must be a number or 'auto', not true."),
        ([3], "it must be a number or 'auto', not a list."),
        (0, "it must be 0.001 or more, or 'auto'."),
        (1000, "it must be 100 or less, or 'auto'."),
    ],
)
def test_all_that_may_stand_there_is_named(value: Any, said: str) -> None:
    body = {"model": "m", "training_file": "f", "hyperparameters": {"n_epochs": value}}
    error = fault(FineTuningJobBody, body)
    assert error.param == "hyperparameters.n_epochs"
    assert error.message == f"Invalid value for 'hyperparameters.n_epochs': {said}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "'stop': it must be a string or a list, not 5."),
        ({"temperature": "1.5"}, "'temperature': it must be a number without quotes."),
        ({"temperature": 3}, "'temperature': it must be 2 or less."),
        ({"n": 2.5}, "'n': it must be an integer, not 2.5."),
        ({"messages": {}}, "'messages': it must be a list, not an object."),
        ({"tool_choice": 5}, "it must be an object or 'none', 'auto' or 'required', not 5."),
        ({"modalities": ["audio"]}, "'modalities.0': it must be 'text'."),
        ({"tool_choice": {"type": "custom"}}, "'tool_choice' is of type `custom`, which is not"),
        ({"tools": [FUNCTION], "tool_choice": "g"}, "there is no tool g: it is none, auto, req"),
    ],
)
def test_a_chats_fault_is_said(fields: dict[str, Any], message: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    assert message in fault(ChatBody, body).message


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (BatchBody, {"endpoint": "/v1/moderations"}, "'endpoint': must be one of /v1/chat/comp"),
        (UploadBody, {"purpose": "x"}, "'purpose': must be one of fine-tune, batch,"),
        (
            FineTuningJobBody,
            {"method": {"type": "x"}},
            "must be supervised, dpo or reinforcement; `x` is not",
        ),
        (FeedbackBody, {"corrected_answer": {"x": 1}}, "must be a message of the assistant"),
    ],
)
def test_a_validators_words_are_ours_alone(kind: Any, body: Any, message: str) -> None:
    whole = next(sample for known, sample in BODIES if known is kind)
    assert message in fault(kind, {**whole, **body}).message


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for step, each in inner:
        yield (*path, step)
        if isinstance(each, dict | list):
            yield from places(each, (*path, step))


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=lambda each: getattr(each, "__name__", ""))
def test_no_wrong_value_is_told_in_words_of_pydantic(kind: Any, body: Any) -> None:
    parse_body(kind, json.dumps(body).encode())
    for path in places(body):
        for value in WRONG:
            wrong = copy.deepcopy(body)
            here = wrong
            for step in path[:-1]:
                here = here[step]
            here[path[-1]] = value
            try:
                parsed = parse_body(kind, json.dumps(wrong).encode())
                if isinstance(parsed, ResponsesBody):
                    chat_body(parsed)
            except InvalidRequest as error:
                assert not re.search(
                    r"Value error|Assertion failed|Input should|NoneType|\bvalid (string|integer)",
                    error.message,
                ), (path, value, error.message)
