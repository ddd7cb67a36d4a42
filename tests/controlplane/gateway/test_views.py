"""The gateway as its clients see it: the official client, and raw sockets where bytes matter.

A real web server, a real worker around an engine that echoes, a real accountant.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psycopg
import pytest
from openai import AsyncOpenAI, OpenAI

from contract.messages.protocol import job_key
from controlplane.gateway.asgi import MAX_BODY_BYTES
from tests.controlplane.schemas.test_kept_plans import new_schema
from tests.fakes import FAKE_CONTEXT, FAKE_NAME
from tests.live import LiveStack, Process, wait_for

POOL = "gateway"
STEP_S = 0.002


@dataclasses.dataclass(frozen=True)
class Gateway:
    live: LiveStack
    url: str
    web: Process

    def client(self, tenant: str = "acme", **options: Any) -> OpenAI:
        key = options.pop("api_key", self.live.tenants[tenant].key)
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = self.live.tenants["acme"].key
        return httpx.post(
            self.url + path,
            content=content,
            headers={"Authorization": f"Bearer {key}", **headers},
            timeout=30,
        )


@pytest.fixture(scope="module")
def gateway(live: LiveStack) -> Iterator[Gateway]:
    pool = live.with_pool(POOL)
    web, url = pool.start_web(DATABASE_POOL_SIZE="4")
    worker = pool.start_worker("gateway-worker", step_s=STEP_S)
    accountant = pool.start_accountant()
    yield Gateway(pool, url, web)
    assert web.stop() == -signal.SIGTERM  # uvicorn raises it again once it has shut down
    for process in (worker, accountant):
        assert process.stop() == 0, process.log.read_text()


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def request_id(response: Any) -> str:
    """The id under which a request is billed: that of the x-request-id header."""
    return str(response._request_id)


def test_a_chat(gateway: Gateway) -> None:
    answer = gateway.client().chat.completions.create(
        model="acme-adapter", messages=say("Grüße 🦜")
    )
    assert answer.choices[0].message.content == "Grüße 🦜"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert request_id(answer) == answer.id.replace("chatcmpl-", "req_")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    row = gateway.live.usage_row(request_id(answer))
    assert (row["model"], row["base_model"]) == ("acme-adapter", FAKE_NAME)
    assert str(row["tenant_id"]) == gateway.live.tenants["acme"].id
    assert row["prompt_tokens"] == answer.usage.prompt_tokens
    assert row["completion_tokens"] == answer.usage.completion_tokens


def test_an_empty_model_is_the_base(gateway: Gateway) -> None:
    client: Any = gateway.client()
    chat = client.chat.completions.create(model="", messages=say("x"))
    plain = client.completions.create(model="", prompt="x")
    response = client.responses.create(model="", input="x")
    assert {chat.model, plain.model, response.model} == {FAKE_NAME}
    assert gateway.live.usage_row(request_id(chat))["model"] == FAKE_NAME


def test_a_streamed_chat(gateway: Gateway) -> None:
    stream = gateway.client().chat.completions.create(
        model="acme-adapter",
        messages=say("the quick 🦜 fox"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == "the quick 🦜 fox"
    assert len([piece for piece in pieces if piece]) > 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    row = gateway.live.usage_row(chunks[0].id.replace("chatcmpl-", "req_"))
    assert row["completion_tokens"] == chunks[-1].usage.completion_tokens


async def test_many_at_once_through_the_async_client(gateway: Gateway) -> None:
    client = AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.live.tenants["acme"].key, max_retries=0
    )

    async def streamed(text: str) -> str:
        stream = await client.chat.completions.create(
            model=FAKE_NAME, messages=say(text), stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(pieces)

    async def whole(text: str) -> str:
        answer = await client.chat.completions.create(model=FAKE_NAME, messages=say(text))
        return answer.choices[0].message.content or ""

    texts = [f"request {number} 世界 " * 3 for number in range(40)]
    answers = await asyncio.gather(
        *(streamed(text) if index % 2 else whole(text) for index, text in enumerate(texts))
    )
    await client.close()
    assert answers == texts


def test_completions(gateway: Gateway) -> None:
    completions = gateway.client().completions
    answer = completions.create(model=FAKE_NAME, prompt="one two", max_tokens=4, logprobs=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 4
    assert "".join(answer.choices[0].logprobs.tokens or []) == answer.choices[0].text
    by_ids = completions.create(model=FAKE_NAME, prompt=[[70, 71, 72]], max_tokens=3)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3
    stream = completions.create(model=FAKE_NAME, prompt="one two", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one two"


def test_several_choices_share_a_prompt_and_are_billed_once(gateway: Gateway) -> None:
    create = gateway.client().chat.completions.create
    one = create(model=FAKE_NAME, messages=say("one of three"))
    answer = create(model=FAKE_NAME, messages=say("one of three"), n=3, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["one of three"] * 3
    assert all(choice.logprobs and choice.logprobs.content for choice in answer.choices)
    assert answer.usage is not None and one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * one.usage.completion_tokens
    row = gateway.live.usage_row(request_id(answer))
    assert row["completion_tokens"] == answer.usage.completion_tokens
    stream = create(
        model=FAKE_NAME,
        messages=say("one, two, three"),
        n=2,
        stop=[", three"],
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends = {0: "", 1: ""}, []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == {0: "one, two", 1: "one, two"}
    assert sorted(ends) == [(0, "stop"), (1, "stop")]
    assert chunk.usage is not None
    row = gateway.live.usage_row(chunk.id.replace("chatcmpl-", "req_"))
    assert row["completion_tokens"] == chunk.usage.completion_tokens


def test_several_prompts_in_one_request(gateway: Gateway) -> None:
    create = gateway.client().completions.create
    prompts = ["the first", "second", "a third one"]
    answer = create(model=FAKE_NAME, prompt=prompts, n=2, echo=True, max_tokens=50)
    expected = [prompt * 2 for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    alone = [create(model=FAKE_NAME, prompt=prompt, max_tokens=50).usage for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(usage.prompt_tokens for usage in alone if usage)
    assert answer.usage.completion_tokens == 2 * sum(
        usage.completion_tokens for usage in alone if usage
    )
    assert gateway.live.usage_row(request_id(answer))["prompt_tokens"] == answer.usage.prompt_tokens
    by_ids = create(model=FAKE_NAME, prompt=[[70, 71], [72]], max_tokens=1, echo=True)
    assert len(by_ids.choices) == 2
    assert by_ids.usage is not None
    assert (by_ids.usage.prompt_tokens, by_ids.usage.completion_tokens) == (3, 2)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=FAKE_NAME, prompt=["fine", "x" * 600])
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_a_blend_of_adapters(gateway: Gateway) -> None:
    def blend(*parts: Any, **fields: Any) -> httpx.Response:
        return gateway.post({"messages": say("x"), "adapters": list(parts), **fields})

    answer = blend({"name": "acme-adapter", "weight": 0.5}).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("acme-adapter", "x")
    answer = blend({"model": "acme-adapter@1"}, model=FAKE_NAME).json()
    assert answer["model"] == FAKE_NAME
    foreign = blend({"name": "acme-adapter"}, {"name": "globex-adapter"})
    nothing = blend({"name": "acme-adapter"}, {"name": "not-even-one"})
    assert (foreign.status_code, foreign.json()["error"]["param"]) == (404, "adapters.1.name")
    assert foreign.text.replace("globex-adapter", "not-even-one") == nothing.text
    for response, param in (
        (blend({"name": "acme-adapter"}, {"name": "acme-adapter@1"}), "adapters.1.name"),
        (blend({"name": FAKE_NAME}), "adapters.0.name"),
        (blend({"name": "acme-adapter"}, model="unserved"), "adapters.0.name"),
        (blend({"name": "acme-adapter"}, model="acme-misfit"), "model"),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_stop_strings_across_chunks(gateway: Gateway) -> None:
    create = gateway.client().chat.completions.create
    text = "first sentence. second sentence. third"
    stream = create(model=FAKE_NAME, messages=say(text), stop=[". third", "ence. s"], stream=True)
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == "first sent"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs(gateway: Gateway) -> None:
    answer = gateway.client().chat.completions.create(
        model=FAKE_NAME, messages=say("héy"), logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert bytes(byte for entry in entries for byte in entry.bytes or []) == "héy".encode()
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)


def test_logprobs_go_on_through_the_stop_string(gateway: Gateway) -> None:
    answer = gateway.client().chat.completions.create(
        model=FAKE_NAME, messages=say("one. two"), stop=[". t"], logprobs=True
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    told = bytes(byte for entry in choice.logprobs.content or [] for byte in entry.bytes or [])
    assert (choice.message.content, told) == ("one", b"one. t")


def test_models_are_the_tenants_own(gateway: Gateway) -> None:
    client = gateway.client()
    ids = [model.id for model in client.models.list()]
    assert "acme-adapter" in ids
    assert FAKE_NAME in ids
    assert not [name for name in ids if name.startswith("globex")]
    assert client.models.retrieve("acme-adapter").object == "model"
    assert client.models.retrieve("acme-adapter@1").id == "acme-adapter@1"


def test_another_tenants_model_is_as_unknown_as_one_that_is_not(gateway: Gateway) -> None:
    def refusal(model: str) -> tuple[int, str]:
        response = gateway.post({"model": model, "messages": say("x")})
        return response.status_code, response.text.replace(model, "MODEL")

    assert refusal("globex-adapter") == refusal("nothing-there")
    assert refusal("globex-adapter")[0] == 404
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.client().models.retrieve("globex-adapter")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "key",
    ["", "sk-wrong", "lk_live_" + "a" * 71, "revoked"],
    ids=["none", "other", "wrong", "revoked"],
)
def test_a_wrong_key(gateway: Gateway, key: str) -> None:
    if key == "revoked":
        key = gateway.live.tenants["acme"].revoked_key
    headers = {"Authorization": f"Bearer {key}" if key else ""}
    for body in ({"model": FAKE_NAME, "messages": say("x")}, b"not json"):
        response = gateway.post(body, **headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_that_is_too_long_is_a_400(gateway: Gateway, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client().chat.completions.create(
            model=FAKE_NAME, messages=say("x" * 600), stream=stream
        )
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert str(FAKE_CONTEXT) in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client().completions.create(model=FAKE_NAME, prompt="x" * 600, stream=stream)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "model,kind,code",
    [
        ("acme-misfit", openai.ConflictError, "adapter_incompatible"),
        ("acme-lost", openai.InternalServerError, "adapter_unavailable"),
        ("unserved", openai.InternalServerError, "overloaded"),
    ],
)
def test_what_cannot_be_served_says_why(
    gateway: Gateway, model: str, kind: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        gateway.client().chat.completions.create(model=model, messages=say("x"))
    assert caught.value.code == code
    headers = caught.value.response.headers
    if caught.value.status_code == 503:
        assert int(headers["retry-after"]) >= 1
    else:
        assert headers["x-should-retry"] == "false"  # the client would repeat any 409


def test_a_token_id_beyond_the_vocabulary_names_the_field(gateway: Gateway) -> None:
    response = gateway.post({"model": FAKE_NAME, "messages": say("x"), "logit_bias": {"9999": 1}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
    response = gateway.post({"model": FAKE_NAME, "prompt": [9999]}, "/v1/completions")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_the_headers_of_every_answer(gateway: Gateway) -> None:
    good = gateway.post({"model": FAKE_NAME, "messages": say("x")})
    bad = gateway.post({"model": FAKE_NAME})
    for response in (good, bad):
        assert response.headers["x-request-id"].startswith("req_")
        assert int(response.headers["openai-processing-ms"]) >= 0
        assert response.headers["content-type"] == "application/json"
    assert set(bad.json()["error"]) == {"message", "type", "param", "code"}


def test_the_bytes_of_a_stream(gateway: Gateway) -> None:
    response = gateway.post({"model": FAKE_NAME, "messages": say("hi"), "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in response.headers
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        assert event.startswith(b"data: {")
        json.loads(event[6:])


def test_other_addresses_and_methods(gateway: Gateway) -> None:
    response = httpx.get(f"{gateway.url}/v1/moderations")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
    response = httpx.get(f"{gateway.url}/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_long_body_is_read(gateway: Gateway) -> None:
    response = gateway.post({"model": FAKE_NAME, "messages": say("x" * 3_000_000)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_that_is_too_long_is_not_read(gateway: Gateway) -> None:
    response = gateway.post(b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        for _ in range(MAX_BODY_BYTES // 65536 + 2):
            yield b" " * 65536

    key = gateway.live.tenants["acme"].key
    try:
        status = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            content=pieces(),
            headers={"Authorization": f"Bearer {key}"},
        ).status_code
    except httpx.WriteError:  # it was refused while it was being sent
        status = 413
    assert status == 413


def open_request(
    gateway: Gateway, max_tokens: int, *, stream: bool = True
) -> tuple[socket.socket, Any]:
    """A raw connection with a long request under way."""
    parts = urlsplit(gateway.url)
    body = json.dumps(
        {
            "model": FAKE_NAME,
            "messages": say("for ever "),
            "stream": stream,
            "ignore_eos": True,
            "max_tokens": max_tokens,
        }
    )
    connection = socket.create_connection((parts.hostname or "", parts.port or 0))
    connection.sendall(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {gateway.live.tenants['acme'].key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection, connection.makefile("rb")


def test_a_client_that_leaves_a_stream_stops_its_generation(gateway: Gateway) -> None:
    connection, file = open_request(gateway, max_tokens=490)
    request = next(
        line.split(b": ")[1].strip().decode()
        for line in iter(file.readline, b"\r\n")
        if line.lower().startswith(b"x-request-id")
    )
    file.readline()
    file.close()
    connection.close()
    row = gateway.live.usage_row(request)
    assert row["finish_reason"] == "cancelled"
    assert 1 <= row["completion_tokens"] < 490


def test_a_client_that_leaves_before_the_answer_stops_its_generation(gateway: Gateway) -> None:
    before, ended = len(cancelled(gateway)), jobs(gateway)
    connection, file = open_request(gateway, max_tokens=490, stream=False)
    wait_for(lambda: jobs(gateway) - ended, what="the request's job")
    file.close()
    connection.close()
    rows = wait_for(lambda: cancelled(gateway)[before:], what="the cancelled request's usage")
    assert rows[0] < 490


def jobs(gateway: Gateway) -> set[bytes]:
    """Keys of the pool's jobs that Redis has."""
    return set(gateway.live.redis.scan_iter(job_key(gateway.live.pool, "*")))


def cancelled(gateway: Gateway) -> list[int]:
    """Tokens of the requests that were cancelled so far."""
    with psycopg.connect(gateway.live.database_url) as connection:
        rows = connection.execute(
            "select completion_tokens from usage_usagerecord"
            " where finish_reason = 'cancelled' order by occurred_at"
        ).fetchall()
    return [row[0] for row in rows]


def test_a_restarted_database_is_found_again(gateway: Gateway) -> None:
    # As the application, whose connections these are: nobody else may end them.
    with psycopg.connect(gateway.live.env["DATABASE_URL"]) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and usename = current_user"
            " and pid <> pg_backend_pid()"
        )
    time.sleep(0.6)  # so that the key and the model are asked for again
    answer = gateway.client().chat.completions.create(model="acme-adapter", messages=say("x"))
    assert gateway.live.usage_row(request_id(answer))["completion_tokens"] == 2


def test_no_connection_is_held_while_an_answer_is_generated(gateway: Gateway) -> None:
    """More streams than the pool has connections, and room for a look at the models beside."""
    opened = [open_request(gateway, max_tokens=400) for _ in range(8)]
    for _, file in opened:
        assert file.readline().startswith(b"HTTP/1.1 200")
    time.sleep(0.6)
    assert gateway.client().models.retrieve("acme-adapter").id == "acme-adapter"
    for connection, file in opened:
        file.close()
        connection.close()


def test_the_rest_of_the_site_is_still_there(gateway: Gateway) -> None:
    assert httpx.get(f"{gateway.url}/healthz").text == "ok"
    assert httpx.get(f"{gateway.url}/admin/").status_code == 302


def test_a_keys_last_use_is_noted_also_when_it_is_refused(gateway: Gateway) -> None:
    key = gateway.live.tenants["globex"].key
    public_id = key.split("_")[2][:22]

    with psycopg.connect(gateway.live.database_url) as connection:
        connection.execute(
            "update tenants_apikey set last_used_at = null where public_id = %s", (public_id,)
        )
    time.sleep(0.6)  # a key seen before is in memory for half a second

    def last_used_at() -> Any:
        with psycopg.connect(gateway.live.database_url) as connection:
            (found,) = connection.execute(
                "select last_used_at from tenants_apikey where public_id = %s", (public_id,)
            ).fetchone() or (None,)
        return found

    assert last_used_at() is None
    with pytest.raises(openai.NotFoundError):
        gateway.client("globex").completions.create(model="nothing", prompt="x")
    wait_for(last_used_at, what="the note")


def test_a_model_ends_on_its_day(gateway: Gateway) -> None:
    client = gateway.client()

    def ends_on(day: dt.date | None) -> None:
        with psycopg.connect(gateway.live.database_url) as connection:
            connection.execute(
                "update adapters_basemodel set shutdown_date = %s where name = 'unserved'", (day,)
            )

    def refusal() -> openai.NotFoundError | None:
        try:
            client.chat.completions.create(model="unserved", messages=say("x"))
        except openai.InternalServerError:  # nobody serves it
            return None
        except openai.NotFoundError as error:
            return error
        raise AssertionError("it answered")

    def announced() -> Any:
        model = client.models.retrieve("unserved")
        return model if model.shutdown_date else None

    today = dt.datetime.now(dt.UTC).date()
    try:
        ends_on(today + dt.timedelta(days=400))
        model = wait_for(announced, timeout_s=1.0, what="the announcement")
        assert model.shutdown_date == str(today + dt.timedelta(days=400))
        assert model in client.models.list().data
        assert refusal() is None
        ends_on(today)
        error = wait_for(refusal, timeout_s=1.0, what="the shutdown")
        assert (error.code, error.param) == ("model_not_found", "model")
        assert f"was shut down on {today}" in error.message
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("unserved")
        assert "unserved" not in {found.id for found in client.models.list()}
    finally:
        ends_on(None)
    wait_for(lambda: refusal() is None, timeout_s=1.0, what="its return")


def test_every_name_of_a_version_means_the_same(gateway: Gateway) -> None:
    client = gateway.client()
    full = f"ft:{FAKE_NAME}:acme:acme-adapter:1"
    for name in (full, "acme-adapter@1", "acme-adapter"):
        model: Any = client.models.retrieve(name)
        assert (model.id, model.parent, model.version) == (name, FAKE_NAME, 1)
        assert model.shutdown_date is None
    answer = client.chat.completions.create(model=full, messages=say("x"))
    assert answer.model == full
    for wrong in (
        f"ft:{FAKE_NAME}:globex:acme-adapter:1",
        "ft:unserved:acme:acme-adapter:1",
        f"ft:{FAKE_NAME}:globex:globex-adapter:1",
        f"{full}:ckpt-step-1",
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(wrong)
        assert caught.value.code == "model_not_found"


def test_a_deleted_model_is_gone_and_a_base_model_stays(gateway: Gateway) -> None:
    client = gateway.client("globex")
    with pytest.raises(openai.PermissionDeniedError):
        client.models.delete(FAKE_NAME)
    with pytest.raises(openai.NotFoundError):
        client.models.delete("acme-adapter")
    assert client.models.delete("globex-lost").deleted
    time.sleep(0.6)  # until no answer about it is fresh
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("globex-lost")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("globex-lost@1")
    assert "globex-lost" not in [model.id for model in client.models.list()]
    with psycopg.connect(gateway.live.database_url) as connection:
        rows = connection.execute(
            "select action, request_id from audit_auditevent"
            " where actor_type = 'api_key'"
            " and action in ('adapter_version.retired', 'adapter.live_version_set') order by seq"
        ).fetchall()
    # Beside those of other tests on the same platform.
    assert {row[0] for row in rows} == {"adapter_version.retired", "adapter.live_version_set"}
    assert all(row[1].startswith("req_") for row in rows)


def test_headers_name_the_organization_and_the_version_of_the_api(gateway: Gateway) -> None:
    headers = {"OpenAI-Organization": "org-of-somebody", "OpenAI-Project": "proj_1"}
    good = gateway.post({"model": FAKE_NAME, "messages": say("x")}, **headers)
    assert good.status_code == 200
    assert good.headers["openai-organization"] == "acme"
    bad = gateway.post({"model": FAKE_NAME}, Authorization="Bearer no")
    assert "openai-organization" not in bad.headers
    for response in (good, bad):
        assert response.headers["openai-version"] == "2020-10-01"


def test_a_call_of_a_tool(gateway: Gateway) -> None:
    """The engine echoes, so the message is the model's text; grammars are real engines' matter."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    create = gateway.client().chat.completions.create
    answer = create(model=FAKE_NAME, messages=say(text), tools=tools)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.type, call.function.arguments) == ("function", '{"a": "b"}')  # type: ignore[union-attr]
    plain = create(model=FAKE_NAME, messages=say(text), tools=tools, tool_choice="none")
    assert plain.choices[0].message.content == text
    chunks = list(create(model=FAKE_NAME, messages=say(text), tools=tools, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == '{"a": "b"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_work_for_a_schema_does_not_tell_that_another_tenant_sent_it(gateway: Gateway) -> None:
    """Measured as time of the server's processor, which other work does not lengthen."""

    def seconds(tenant: str, schema: dict[str, Any]) -> float:
        began = gateway.web.cpu_s()
        body = {
            "model": FAKE_NAME,
            "messages": say("{}"),
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
        }
        key = gateway.live.tenants[tenant].key
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{gateway.url}/v1/chat/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=30).status_code == 200
        return gateway.web.cpu_s() - began

    same = fresh = again = 0.0
    for number in range(4):
        theirs, mine = new_schema(60), new_schema(60)
        seconds("acme", theirs)
        again += seconds("acme", theirs)
        for schema in ((theirs, mine), (mine, theirs))[number % 2]:
            spent = seconds("globex", schema)
            same, fresh = (same + spent, fresh) if schema is theirs else (same, fresh + spent)
    assert again < 0.7 * same, "a tenant's own is kept"
    assert 0.7 < same / fresh < 1.4
