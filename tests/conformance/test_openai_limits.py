"""What a key may not do, or not now, through the official client and its retries."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from controlplane.gateway.asgi import MAX_BODY_BYTES
from tests.conformance.conftest import Served, say
from tests.fakes import FAKE_NAME

#: argv: tenant id, then fields of the key's rules, limits and budget as JSON. Prints the key.
MAKE_KEY = """
import json, os, sys, uuid
os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
import django
django.setup()
from controlplane.usage.limits.services import budget_set, rate_limit_set
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.key_services import api_key_create
rules, limits, budget = json.loads(sys.argv[2])
with tenant_scope(uuid.UUID(sys.argv[1])):
    row, key = api_key_create(name="limited", rules=KeyRules(**rules))
    if limits:
        rate_limit_set(api_key_id=row.id, **limits)
    if budget:
        budget_set(api_key_id=row.id, period="month", hard_limit=budget)
    print(key)
"""


def client_of(
    served: Served,
    *,
    limits: dict[str, int] | None = None,
    budget: int | None = None,
    max_retries: int = 0,
    **rules: Any,
) -> openai.OpenAI:
    """A client with a key of its own."""
    argv = json.dumps([rules, limits, budget])
    key = served.live.run("-c", MAKE_KEY, served.live.tenants["acme"].id, argv).strip()
    return served.client(api_key=key, max_retries=max_retries)


def ask(client: openai.OpenAI, model: str = FAKE_NAME, **fields: Any) -> Any:
    return client.chat.completions.create(model=model, messages=say("hi"), **fields)


def test_a_key_without_the_scope_is_a_403(served: Served) -> None:
    client = client_of(served, scopes=["read", "files:read"])
    refused: list[Any] = [
        lambda: ask(client),
        lambda: ask(client, stream=True),
        lambda: client.completions.create(model=FAKE_NAME, prompt="hi"),
        lambda: client.responses.create(model=FAKE_NAME, input="hi"),
        lambda: client.models.delete("letters"),
        lambda: client.files.create(file=b"x", purpose="user_data"),
        lambda: client.batches.create(
            input_file_id="file-1", endpoint="/v1/completions", completion_window="24h"
        ),
    ]
    for call in refused:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            call()
        assert caught.value.code == "permission_denied"
        assert caught.value.type == "permission_error"
        assert caught.value.response.headers["x-request-id"].startswith("req_")
    assert client.files.list().data is not None


def test_a_model_that_the_key_may_not_name_is_a_403(served: Served) -> None:
    client = client_of(served, allowed_models=["acme-adapter"])
    assert ask(client, "acme-adapter@1").choices[0].message.content == "hi"
    assert {model.id.partition("@")[0] for model in client.models.list()} == {"acme-adapter"}
    blend = {"adapters": [{"name": "acme-adapter"}, {"name": "acme-second"}]}
    for fields, param in (
        ({"model": FAKE_NAME}, "model"),
        ({"model": "acme-second"}, "model"),
        ({"model": "globex-adapter"}, "model"),  # whether or not there is such a one
        ({"model": f"ft:{FAKE_NAME}:acme:acme-second:1"}, "model"),
        ({"model": None, "extra_body": blend}, "adapters.1.name"),
    ):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            ask(client, **fields)
        assert (caught.value.code, caught.value.param) == ("model_not_allowed", param)
    with pytest.raises(openai.PermissionDeniedError):
        client.models.retrieve("acme-second")


def test_tokenizing_counts_as_a_request(served: Served) -> None:
    client = client_of(served, limits={"requests_per_minute": 2}, max_retries=0)
    headers = {"authorization": f"Bearer {client.api_key}"}
    body = {"model": FAKE_NAME, "prompt": "one two"}
    answers = [
        httpx.post(f"{served.url}/tokenize", json=body, headers=headers, timeout=60)
        for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"


@pytest.mark.alone
def test_the_client_waits_out_a_limit_of_requests(served: Served) -> None:
    per_minute = 20
    client = client_of(served, limits={"requests_per_minute": per_minute}, max_retries=2)
    for left in reversed(range(per_minute)):
        raw = client.chat.completions.with_raw_response.create(model=FAKE_NAME, messages=say("x"))
        assert raw.headers["x-ratelimit-limit-requests"] == str(per_minute)
        assert int(raw.headers["x-ratelimit-remaining-requests"]) >= left
    with pytest.raises(openai.RateLimitError) as caught:
        for _ in range(3):  # one may have been earned meanwhile
            ask(client.with_options(max_retries=0))
    error = caught.value
    assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
    wait = int(error.response.headers["retry-after"])
    assert 1 <= wait <= 60 / per_minute + 1
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
    started = time.monotonic()
    assert ask(client).choices[0].message.content == "hi"  # at its first retry
    assert time.monotonic() - started < wait + 2


def test_a_spent_budget_is_not_asked_of_again(served: Served) -> None:
    client = client_of(served, budget=5, max_retries=2)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client, max_tokens=50)
    error = caught.value
    assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
    assert error.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in error.response.headers
    assert error.response.request.headers["x-stainless-retry-count"] == "0"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_that_is_too_long_is_a_413(served: Served, is_chunked: bool) -> None:
    if not is_chunked:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(served.client(max_retries=2), user="x", extra_body={"x": "y" * MAX_BODY_BYTES})
        assert caught.value.status_code == 413
        assert caught.value.code == "payload_too_large"
        assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
        return
    pieces = (b"x" * 65536 for _ in range(MAX_BODY_BYTES // 65536 + 2))
    headers = {"Authorization": f"Bearer {served.key()}"}
    try:
        answer = httpx.post(f"{served.base_url}/completions", content=pieces, headers=headers)
    except httpx.TransportError:
        return  # the rest was still on its way when the connection was closed
    assert answer.status_code == 413


@pytest.mark.alone
def test_a_long_body_from_nobody_is_not_read(served: Served) -> None:
    """What reading it would cost is for those whom somebody knows."""
    body = b'{"model":"m","prompt":[' + b"{}," * 2_500_000 + b"{}]}"
    started = time.monotonic()
    answer = httpx.post(f"{served.base_url}/completions", content=body, timeout=30)
    assert answer.status_code == 401
    assert time.monotonic() - started < 5
    headers = {"Authorization": f"Bearer {served.key()}"}
    known = httpx.post(f"{served.base_url}/completions", content=body, headers=headers, timeout=30)
    assert (known.status_code, known.json()["error"]["param"]) == (400, "prompt.0")
