"""What a careless or hostile client can send to the gateway: no 500, and no breach of what is
described."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conformance.conftest import Served, say
from tests.fakes import FAKE_NAME
from tests.openapi import generated

BODY: dict[str, Any] = {
    "model": FAKE_NAME,
    "messages": say("a few words to stream"),
    "stream": True,
    "n": 2,
    "stream_options": {"include_usage": True},
}


def test_broken_bodies_are_a_400_each(served: Served) -> None:
    """Any bytes: cut off, flipped, nested, or with odd values in odd places."""
    chance = random.Random(5)
    good = json.dumps({**BODY, "stream": False, "tools": [], "adapters": None}).encode()
    odd: list[Any] = [None, True, -1, 1e308, "", "x" * 5000, [], [[]], {}, {"a": {}}, "\ud800", 0]
    bodies = [good[:cut] for cut in range(0, len(good), 9)]
    for _ in range(60):
        flipped = bytearray(good)
        for _ in range(3):
            flipped[chance.randrange(len(good))] = chance.randrange(256)
        bodies.append(bytes(flipped))
    fields = ["model", "messages", "n", "stop", "tools", "tool_choice", "adapters", "logit_bias"]
    fields += ["response_format", "stream_options", "seed", "metadata", "temperature", "logprobs"]
    for field in fields:
        for value in chance.sample(odd, 6):
            bodies.append(json.dumps({**BODY, "stream": False, field: value}).encode())
    bodies += [b"[" * 100_000, b"\xff\xfe", b'{"model": 1' + b"0" * 5000 + b"}"]
    with httpx.Client(base_url=served.url, timeout=30) as client:
        for body in bodies:
            answer = client.post(
                "/v1/chat/completions",
                content=body,
                headers={"Authorization": f"Bearer {served.key()}"},
            )
            assert answer.status_code in (200, 400, 404), (answer.status_code, body[:300])
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


SCHEMA = schemathesis.openapi.from_dict(generated())
CHECKS = [status_code_conformance, content_type_conformance]
#: What generates in anybody's words, and what lists models; DELETE would take other tests'
#: adapters out of service.
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses")
LORAX_PATHS = ("/", "/generate", "/generate_stream", "/info", "/health")
OPERATIONS = {
    f"{operation.method} {operation.path}": operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())
    if (operation.path.startswith(PATHS) or operation.path in LORAX_PATHS)
    and operation.method != "delete"
}


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"get /health"}))
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
def test_the_described_api_is_the_real_one(served: Served, name: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode))
    def play(case: schemathesis.Case) -> None:
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            # So that more is tried than a model's absence.
            if case.path in LORAX_PATHS:
                case.body["parameters"] = {
                    **(case.body.get("parameters") or {}),
                    "adapter_id": FAKE_NAME,
                    "merged_adapters": None,
                }
            else:
                case.body["model"] = FAKE_NAME
                case.body.pop("adapters", None)
        response = case.call(
            base_url=served.url, headers={"Authorization": f"Bearer {served.key()}"}, timeout=60
        )
        assert response.status_code < 500 or response.status_code == 503, response.text
        # Of a stream the description says no more than that it is one.
        is_stream = response.headers["content-type"][0] == "text/event-stream"
        more = [] if is_stream else [response_schema_conformance]
        case.validate_response(response, checks=[*CHECKS, *more])

    play()
