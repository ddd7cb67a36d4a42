"""Every face takes the sampling parameters in the ranges of `contract.messages.sampling`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from contract.messages.sampling import ANSWER_TOKENS, BIAS, RANGES
from contract.ranges import Range
from controlplane.aliases.sampling import checked_sampling
from controlplane.errors import InvalidRequest
from controlplane.gateway.lorax.schemas import GenerateBody
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.schemas import ChatBody, CompletionBody, SamplingBody
from tests.range_ends import inside, outside

MESSAGES = [{"role": "user", "content": "hi"}]
COMMON = {name: RANGES[name] for name in SamplingBody.model_fields if name in RANGES}


def chat(**fields: Any) -> None:
    sent = {"model": "m", "messages": MESSAGES, "logprobs": True, **fields}
    parse_body(ChatBody, json.dumps(sent).encode())


def completion(**fields: Any) -> None:
    sent = {"model": "m", "prompt": "p", "echo": True, **fields}
    parse_body(CompletionBody, json.dumps(sent).encode())


def response(**fields: Any) -> None:
    parse_body(ResponsesBody, json.dumps({"model": "m", "input": "p", **fields}).encode())


def lorax(**fields: Any) -> None:
    parse_body(GenerateBody, json.dumps({"inputs": "p", "parameters": fields}).encode())


def alias(**fields: Any) -> None:
    checked_sampling(fields)


OWN_RANGES: list[tuple[Callable[..., None], dict[str, Range]]] = [
    (chat, {"max_tokens": ANSWER_TOKENS, "max_completion_tokens": ANSWER_TOKENS}),
    (chat, COMMON | {"top_logprobs": RANGES["logprobs"]}),
    (completion, COMMON | {name: RANGES[name] for name in ("max_tokens", "prompt_logprobs")}),
    (response, COMMON | {"top_logprobs": RANGES["logprobs"], "max_output_tokens": ANSWER_TOKENS}),
    (lorax, {name: RANGES[name] for name in ("temperature", "repetition_penalty")}),
    (lorax, {"max_new_tokens": ANSWER_TOKENS}),
    (alias, {name: RANGES[name] for name in COMMON if name != "min_tokens"}),
    (alias, {"max_tokens": ANSWER_TOKENS}),
]


@pytest.mark.parametrize(
    ("send", "name", "allowed"),
    [(send, *each) for send, ranges in OWN_RANGES for each in ranges.items()],
    ids=lambda value: value.__name__ if callable(value) else str(value)[:30],
)
def test_a_face_has_the_ranges_of_the_table(
    send: Callable[..., None], name: str, allowed: Range
) -> None:
    for value in inside(allowed):
        send(**{name: value})
    for value in outside(allowed):
        with pytest.raises(InvalidRequest) as caught:
            send(**{name: value})
        assert (caught.value.param or "").split(".")[-1] == name


@pytest.mark.parametrize("send", [chat, completion])
def test_biases_have_the_range_of_the_table(send: Callable[..., None]) -> None:
    for value in inside(BIAS):
        send(logit_bias={"5": value})
    for value in outside(BIAS):
        with pytest.raises(InvalidRequest) as caught:
            send(logit_bias={"5": value})
        assert caught.value.param == "logit_bias.5"
